"""Pinning the host arena for copies to and from a device."""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvstore import pinning
from kvstore.arena import Arena
from kvstore.errors import ConfigError
from support.programs import run

MIB = 1 << 20


class Cuda:
    """What pinning uses of torch, with a record of what is registered."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.devices: list[int] = []

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 3

    def device(self, index: int) -> Any:
        self.devices.append(index)
        return nullcontext()

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        self.calls += 1
        if self.calls == self.fail_at:
            return 2
        self.registered[address] = length
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class TestPinning:
    @pytest.fixture
    def use(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Cuda], Cuda]:
        """Let the process have this device, and blocks of three slots of 1 MiB at most."""

        def install(cuda: Cuda) -> Cuda:
            torch = types.ModuleType("torch")
            torch.cuda = cuda  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, "torch", torch)
            monkeypatch.setattr(pinning, "_BLOCK", 4 * MIB - 1)
            return cuda

        return install

    @pytest.mark.parametrize("pin", ["auto", "on"])
    def test_whole_slots_of_all_the_region_until_closed(
        self, use: Callable[[Cuda], Cuda], pin: pinning.PinMode
    ) -> None:
        cuda = use(Cuda())
        with Arena.create(8 * MIB, MIB, pin=pin) as made:
            assert made.pinned
            blocks = [(made.base, 3 * MIB), (made.base + 3 * MIB, 3 * MIB), (made.base + 6 * MIB, 2 * MIB)]
            assert list(cuda.registered.items()) == blocks
            assert set(cuda.devices) == {3}
        assert cuda.registered == {}
        assert not made.pinned

    def test_a_failure_leaves_all_of_it_pageable(
        self, use: Callable[[Cuda], Cuda], caplog: pytest.LogCaptureFixture
    ) -> None:
        cuda = use(Cuda(fail_at=2))
        with Arena.create(32 * MIB, MIB, pin="auto") as made:
            assert not made.pinned
            assert made.populated == made.slots
            assert (cuda.registered, cuda.calls) == ({}, 2)
        assert ["returned 2" in record.message for record in caplog.records] == [True]

    def test_off(self, use: Callable[[Cuda], Cuda]) -> None:
        cuda = use(Cuda())
        with Arena.create(MIB, MIB, pin="off") as made:
            assert not made.pinned
        assert cuda.calls == 0

    def test_on_without_a_device_warns_once(self, caplog: pytest.LogCaptureFixture) -> None:
        try:
            import torch

            if torch.cuda.is_available():
                pytest.skip("this machine can pin")
        except ImportError:
            pass
        with Arena.create(MIB, MIB, pin="on") as made:
            assert not made.pinned
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "pageable" in caplog.text

    def test_auto_never_imports_torch(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
        program = """
            import sys
            from kvstore.arena import Arena
            print(Arena.create(65536, 65536).pinned, "torch" in sys.modules)
        """
        assert run(program, env={**os.environ, "PYTHONPATH": str(tmp_path)}) == "False False"

    def test_no_such_mode(self) -> None:
        with pytest.raises(ConfigError, match="auto, on or off"):
            Arena.create(MIB, MIB, pin="yes")  # type: ignore[arg-type]
