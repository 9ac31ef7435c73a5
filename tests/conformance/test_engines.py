"""The shipped conformance suite on the engines that live in this process."""

from __future__ import annotations

import msgspec

from kvstore.arena import Arena
from kvstore.config import StoreConfig
from kvstore.engine.base import Engine
from kvstore.engine.inline import InlineEngine
from kvstore.engine.threads import ThreadsEngine
from kvstore.namespace import Namespace
from kvstore.opening import BackendFactory, make_engine
from kvstore.testing.engine import EngineTests


class Configured(EngineTests):
    """An engine as the store makes it."""

    engine = ""
    kind: type[Engine]

    def make_engine(
        self, config: StoreConfig, namespace: Namespace, arena: Arena, factory: BackendFactory
    ) -> Engine:
        made = make_engine(msgspec.structs.replace(config, engine=self.engine), namespace, arena, factory)
        assert isinstance(made, self.kind)
        return made


class TestInline(Configured):
    engine, kind = "inline", InlineEngine


class TestThreads(Configured):
    engine, kind = "threads", ThreadsEngine
