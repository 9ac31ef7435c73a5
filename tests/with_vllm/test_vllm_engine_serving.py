"""The real engine, in this process, answers with offloading exactly what it answers without.

Every test fills the host tier and what is below it, makes the device cache forget, and asks again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_engines import (
    BLOCK,
    CHUNK_BYTES,
    LENGTH,
    Engine,
    Outputs,
    make_model,
    offloading,
    open_engine,
    prompts,
)

from kvstore_vllm.acks import Direction
from kvstore_vllm.copies import CpuCopier
from kvstore_vllm.copies.layout import Placed
from support.object_store import Bucket
from support.processes import Footprint, children, engine_of, stopped, wait_for

#: Whole chunks of a prompt, and the tokens in them: the rest is never stored.
CHUNKS = LENGTH // BLOCK
STORED = CHUNKS * BLOCK
#: A host tier that holds a prompt and a half.
SMALL = 18 * CHUNK_BYTES


def fill(engine: Engine, expected: Outputs) -> None:
    """Ask all prompts for the first time; nothing can come from anywhere."""
    assert engine.answers(prompts()) == expected
    engine.settle()


def fail_stores(copy: Callable[..., int]) -> Callable[..., int]:
    """In place of :meth:`CpuCopier._copy`: it loads, and cannot store."""

    def failing(copier: CpuCopier, direction: Direction, placed: Placed) -> int:
        if direction == "store":
            raise OSError("the device is gone")
        return copy(copier, direction, placed)

    return failing


def objects(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


class TestHost:
    def test_without_offloading_answers_are_reproducible(self, llama: Path, expected: Outputs) -> None:
        with open_engine(llama) as engine:
            assert engine.answers(prompts()) == expected
            assert [engine.answers([prompt])[0] for prompt in prompts()] == expected
            assert sum(engine.cached(prompts())) < STORED  # what the device forgets is computed again
        assert len(set(expected)) == len(expected)

    def test_what_the_device_forgets_comes_back(self, llama: Path, expected: Outputs) -> None:
        with open_engine(llama, offloading()) as engine:
            fill(engine, expected)
            assert engine.answers(prompts()) == expected
            assert engine.cached(prompts()) == [STORED] * len(expected)
            host = engine.store.stats().host
        assert host.chunks >= CHUNKS * len(expected)

    def test_wrong_bytes_would_be_seen(self, llama: Path, expected: Outputs) -> None:
        """The control: with zeros in host memory the answers differ, so loads do reach the device."""
        with open_engine(llama, offloading()) as engine:
            fill(engine, expected)
            arena = engine.store.arena
            for slot in range(arena.slots):
                arena.view(slot)[:] = bytes(arena.slot_size)
            found = engine.answers(prompts())
        differing = [one for one, other in zip(found, expected, strict=True) if one != other]
        assert len(differing) >= len(expected) - 2  # the device still has the last two

    @pytest.mark.parametrize("blocks", [1, 4])
    def test_chunks_of_several_blocks(
        self, llama: Path, expected: Outputs, tmp_path: Path, blocks: int
    ) -> None:
        extra = offloading(str(tmp_path), blocks_per_chunk=blocks)
        with open_engine(llama, extra) as engine:
            fill(engine, expected)
            assert engine.answers(prompts()) == expected
            assert engine.store.chunk_size == blocks * CHUNK_BYTES
        with open_engine(llama, extra) as engine:
            assert engine.answers(prompts()) == expected
            stored = LENGTH // (BLOCK * blocks) * BLOCK * blocks
            assert engine.cached(prompts()) == [stored] * len(expected)

    def test_longer_prompts_go_on_where_the_stored_part_ends(self, llama: Path) -> None:
        """A load begins in the middle of a chunk of four blocks, after what the device still has."""
        longer = [prompt + more for prompt, more in zip(prompts(), prompts(seed=1, length=120), strict=True)]
        with open_engine(llama) as engine:
            wanted = engine.answers(longer)
        with open_engine(llama, offloading(blocks_per_chunk=4)) as engine:
            for prompt in prompts():
                engine.answers([prompt[:80]])
                engine.answers([prompt])
            engine.settle()
            assert engine.answers(longer) == wanted
            engine.settle()
            assert engine.answers(longer) == wanted

    def test_host_smaller_than_a_prompt(self, llama: Path, expected: Outputs) -> None:
        with open_engine(llama, offloading(capacity=8 * CHUNK_BYTES)) as engine:
            for _ in range(3):
                assert engine.answers(prompts()) == expected
                engine.settle()

    @pytest.mark.parametrize("policy", ["lru", "arc", "priority"])
    def test_every_policy(self, llama: Path, expected: Outputs, policy: str) -> None:
        extra = offloading() | {"tiers": [f"ram://?capacity={40 * CHUNK_BYTES}&policy={policy}"]}
        with open_engine(llama, extra) as engine:
            for _ in range(2):
                assert engine.answers(prompts()) == expected


class TestTiers:
    def test_after_a_restart_the_disk_serves(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        with open_engine(llama, offloading(str(tmp_path))) as engine:
            fill(engine, expected)
        assert len(objects(tmp_path)) >= CHUNKS * len(expected)
        with open_engine(llama, offloading(str(tmp_path))) as engine:
            assert engine.answers(prompts()) == expected
            assert engine.store.stats().tier("file").hits >= CHUNKS
            assert engine.cached(prompts()) == [STORED] * len(expected)

    def test_beyond_host_memory(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        with open_engine(llama, offloading(str(tmp_path), capacity=SMALL)) as engine:
            fill(engine, expected)
            for _ in range(2):
                assert engine.answers(prompts()) == expected
            assert engine.store.stats().tier("file").hits > 0  # how many is up to the measured speeds

    def test_memory_tier(self, llama: Path, expected: Outputs) -> None:
        with open_engine(llama, offloading("memory://below", capacity=SMALL)) as engine:
            fill(engine, expected)
            assert engine.answers(prompts()) == expected
            assert engine.store.stats().tier("memory").hits > 0

    def test_bucket(self, llama: Path, expected: Outputs, bucket: Bucket) -> None:
        tier = {"url": bucket.url, "storage_options": bucket.options}
        with open_engine(llama, offloading(tier)) as engine:
            fill(engine, expected)
        with open_engine(llama, offloading(tier)) as engine:
            assert engine.answers(prompts()) == expected
            assert engine.store.stats().tier("s3").hits >= CHUNKS
            assert engine.cached(prompts()) == [STORED] * len(expected)

    def test_configuration_of_vllms_own_tiers(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        """Only the names of the spec change."""
        extra = {
            "spec_name": "KVStoreOffloadingSpec",
            "spec_module_path": "kvstore_vllm",
            "cpu_bytes_to_use": float(SMALL),
            "eviction_policy": "arc",
            "block_size": 2 * BLOCK,
            "secondary_tiers": [
                {"type": "fs", "root_dir": str(tmp_path), "n_read_threads": 2, "n_write_threads": 1}
            ],
        }
        with open_engine(llama, extra) as engine:
            fill(engine, expected)
        with open_engine(llama, extra) as engine:
            assert engine.answers(prompts()) == expected
            assert engine.store.stats().tier("fs").hits >= CHUNKS // 2
        assert objects(tmp_path)

    def test_registered_names_need_no_module(self, llama: Path, expected: Outputs) -> None:
        extra = offloading()
        del extra["spec_module_path"]
        with open_engine(llama, extra) as engine:
            fill(engine, expected)
            assert engine.answers(prompts()) == expected


class TestTrouble:
    @pytest.fixture
    def filled(self, llama: Path, expected: Outputs, tmp_path: Path) -> Path:
        with open_engine(llama, offloading(str(tmp_path))) as engine:
            fill(engine, expected)
        return tmp_path

    def test_corrupted_objects_are_computed_again(self, llama: Path, expected: Outputs, filled: Path) -> None:
        for path in objects(filled)[::5]:
            data = bytearray(path.read_bytes())
            data[-1000] ^= 1
            path.write_bytes(data)
        with open_engine(llama, offloading(str(filled))) as engine:
            assert engine.answers(prompts()) == expected
            assert engine.store.stats().tier("file").corrupt > 0

    def test_deleted_objects_are_computed_again(self, llama: Path, expected: Outputs, filled: Path) -> None:
        with open_engine(llama, offloading(str(filled))) as engine:
            engine.store.lookup([bytes.fromhex(path.stem) for path in objects(filled)])
            wait_for(lambda: not engine.store.busy)  # now it believes that they are there
            for path in objects(filled)[::3]:
                path.unlink()
            assert engine.answers(prompts()) == expected

    def test_everything_is_gone(self, llama: Path, expected: Outputs, filled: Path) -> None:
        for path in objects(filled):
            path.unlink()
        with open_engine(llama, offloading(str(filled))) as engine:
            assert engine.answers(prompts()) == expected

    def test_hung_tier_is_served_by_computing(self, llama: Path, expected: Outputs, filled: Path) -> None:
        """No step of the engine takes as long as a tier has for its answers."""
        extra = offloading(f"file://{filled}?timeout=3s", lookup_timeout="300ms")
        with open_engine(llama, extra) as engine, stopped(engine_of(engine.store).pids):
            assert engine.answers_of_steps(prompts()) == expected
            assert max(engine.steps) < 2.0

    def test_a_request_that_waits_for_a_hung_tier_slows_no_other(
        self, llama: Path, expected: Outputs, filled: Path
    ) -> None:
        """Steps that decode take as long with such requests beside them as alone, the slowest ones too.

        Other programs on this machine make steps slow as well, so the quietest rounds are compared.
        """
        short = prompts(1, length=20, seed=5)
        alone, beside = [], []
        with open_engine(llama, offloading(f"file://{filled}?timeout=60s")) as engine:
            engine.decode(short, 40)
            for prompt in prompts():
                alone.append(np.percentile(engine.decode(short, 300), 99))
                with stopped(engine_of(engine.store).pids):
                    beside.append(np.percentile(engine.decode(short, 300, beside=[prompt]), 99))
            assert engine.answers(prompts()) == expected
        assert min(beside) < 1.5 * min(alone)

    def test_what_could_not_be_copied_is_never_found(
        self, llama: Path, expected: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its slots hold anything. vLLM, which may not be told, offers the chunks with the next request."""
        extra = offloading(str(tmp_path))
        with open_engine(llama, extra) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(CpuCopier, "_copy", fail_stores(CpuCopier._copy))
                fill(engine, expected)
            assert engine.store.stats().host.chunks == 0
            assert objects(tmp_path) == []
            engine.forget()
            assert engine.cached(prompts()[:1]) == [0]
            fill(engine, expected)
            assert engine.answers(prompts()) == expected
        with open_engine(llama, extra) as engine:
            assert engine.answers(prompts()) == expected
            assert engine.cached(prompts()) == [STORED] * len(expected)

    def test_tier_that_is_down_at_the_start(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        tier = {
            "url": "s3://nowhere/kv",
            "storage_options": {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"},
        }
        with open_engine(llama, offloading({**tier, "timeout": "1s"})) as engine:
            fill(engine, expected)
            assert engine.answers(prompts()) == expected

    def test_other_weights_see_nothing(self, llama: Path, filled: Path, tmp_path_factory: Any) -> None:
        other = make_model("llama", tmp_path_factory.mktemp("other") / "llama", seed=1)
        with open_engine(other) as engine:
            wanted = engine.answers(prompts())
        with open_engine(other, offloading(str(filled))) as engine:
            assert engine.answers(prompts()) == wanted
            assert engine.store.stats().tier("file").hits == 0


class TestLoad:
    """Many requests at once, more than the device can hold."""

    def test_aborts_and_preemptions(self, llama: Path, tmp_path: Path) -> None:
        asked = prompts(12, length=200) + prompts(12, length=200)
        with open_engine(llama) as engine:
            wanted = engine.answers(asked, tokens=60)
        with open_engine(llama, offloading(str(tmp_path), capacity=SMALL)) as engine:
            for seed in range(3):
                found = engine.answers_of_steps(asked, tokens=60, aborted=0.4, seed=seed)
                assert all(one is None or one == other for one, other in zip(found, wanted, strict=True))
                assert found.count(None) >= 5
            engine.settle()
            assert engine.answers(asked, tokens=60) == wanted
            engine.settle()
            stats = engine.store.stats()
            assert (stats.leased, stats.promoting, stats.quarantined) == (0, 0, 0)

    def test_shared_prefixes_at_once(self, llama: Path, tmp_path: Path) -> None:
        """Many requests for the same chunks, which come from the tier below."""
        [head] = prompts(1, length=256)
        asked = [head + tail for tail in prompts(10, length=100, seed=3)]
        with open_engine(llama) as engine:
            wanted = engine.answers(asked)
        for _ in range(2):
            with open_engine(llama, offloading(str(tmp_path))) as engine:
                assert engine.answers(asked) == wanted
                engine.settle()


class TestResets:
    def test_reset_forgets_every_tier(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        with open_engine(llama, offloading(str(tmp_path))) as engine:
            fill(engine, expected)
            engine.reset()
            hits = engine.store.stats().tier("file").hits
            assert engine.cached(prompts()[:1]) == [0]
            assert engine.answers(prompts()) == expected
            assert engine.store.stats().tier("file").hits == hits
            engine.settle()
            assert engine.answers(prompts()) == expected
            assert engine.cached(prompts()) == [STORED] * len(expected)

    def test_keeping_what_is_stored(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        with open_engine(llama, offloading(str(tmp_path), on_reset="keep")) as engine:
            fill(engine, expected)
            engine.reset()
            assert engine.answers(prompts()) == expected
            assert engine.cached(prompts()) == [STORED] * len(expected)
            assert engine.store.stats().tier("file").hits >= CHUNKS


class TestEnd:
    def test_closing_leaves_nothing(self, llama: Path, expected: Outputs, tmp_path: Path) -> None:
        with open_engine(llama) as engine:  # what vLLM itself leaves
            engine.answers(prompts(1))
        before = Footprint.now()
        with open_engine(llama, offloading(str(tmp_path))) as engine:
            fill(engine, expected)
            assert children() > before.children
        del engine
        gc.collect()
        after = Footprint.now()
        assert after.children == before.children
        assert not {name for name in after.threads - before.threads if name.startswith("kvstore")}
        assert not [what for what in after.descriptors.values() if "kvstore" in what]
