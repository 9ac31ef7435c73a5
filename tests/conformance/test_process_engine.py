"""The conformance suite, over worker processes."""

from __future__ import annotations

import msgspec

from kvstore.arena import Arena
from kvstore.config import StoreConfig
from kvstore.engine.base import Engine
from kvstore.namespace import Namespace
from kvstore.opening import BackendFactory, make_engine
from kvstore.testing.engine import EngineTests


class TestProcessesEngine(EngineTests):
    def make_engine(
        self, config: StoreConfig, namespace: Namespace, arena: Arena, factory: BackendFactory
    ) -> Engine:
        return make_engine(msgspec.structs.replace(config, engine="processes"), namespace, arena, factory)
