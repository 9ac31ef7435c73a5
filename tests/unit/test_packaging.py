"""What ``pip install`` gets: the wheel is built from a copy of the tree and looked into."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

from support.programs import run

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "kvstore", "kvstore_vllm")

#: Every distribution that plain ``pip install kvstore-tiers`` asks for; a new one is a decision.
LIGHT = {"fsspec", "msgspec", "numpy", "prometheus_client", "rich", "tenacity", "tomli_w", "typer", "xxhash"}


def _build(folder: Path, **environment: str) -> ZipFile:
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(source, tree)
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"  # in process: asks no registry
    done = subprocess.run(
        [sys.executable, "-c", build],
        cwd=tree,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    [path] = folder.glob("*.whl")
    return ZipFile(path)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    return _build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def _requirements(metadata: Message) -> dict[str, set[str]]:
    """Extra (empty for none) -> names of the distributions that it asks for."""
    found: dict[str, set[str]] = {}
    for line in metadata.get_all("Requires-Dist", []):
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        assert name is not None
        found.setdefault(extra[1] if extra else "", set()).add(name[0])
    return found


def test_name_licence_and_python(metadata: Message) -> None:
    assert metadata["Name"] == "kvstore-tiers"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "# kvstore" in metadata.get_payload()


def test_dependencies_are_light(metadata: Message) -> None:
    assert {name.replace("-", "_") for name in _requirements(metadata)[""]} == LIGHT


def test_extras_bring_what_is_heavy(metadata: Message) -> None:
    requirements = _requirements(metadata)
    assert {"s3", "torch", "vllm", "p2p", "plot", "all"} <= set(metadata.get_all("Provides-Extra", []))
    assert requirements["s3"] == {"s3fs"}
    assert requirements["torch"] == {"torch"}


def test_wheel_holds_both_packages_typed_and_nothing_else(wheel: ZipFile) -> None:
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in names} == {"kvstore", "kvstore_vllm"}
    assert {"kvstore/py.typed", "kvstore_vllm/py.typed"} <= set(names)
    in_tree = {str(path.relative_to(ROOT)) for path in (ROOT / "kvstore").rglob("*.py")}
    assert in_tree <= set(names)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")
def test_wheel_has_the_compiled_part_and_its_types(wheel: ZipFile) -> None:
    assert {"kvstore/backends/_calls.abi3.so", "kvstore/backends/_calls.pyi"} <= set(wheel.namelist())
    assert "kvstore/backends/_calls.c" not in wheel.namelist()


def test_wheel_can_be_built_without_a_compiler(wheel: ZipFile, tmp_path: Path) -> None:
    plain = _build(tmp_path, CC="false", LDSHARED="false")
    compiled = {name for name in wheel.namelist() if name.endswith(".so")}
    assert set(plain.namelist()) == set(wheel.namelist()) - compiled


def test_wheel_has_the_licence_and_the_command(wheel: ZipFile) -> None:
    by_name = {name.partition(".dist-info/")[2]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert b"Apache License" in wheel.read(by_name["licenses/LICENSE"])
    assert b"kvstore = kvstore.__main__:main" in wheel.read(by_name["entry_points.txt"])
    plugin = b"[vllm.general_plugins]\nkvstore = kvstore_vllm.plugin:register"
    assert plugin in wheel.read(by_name["entry_points.txt"])


def test_whoever_lacks_the_package_of_an_extra_reads_how_to_get_it() -> None:
    said = run(
        """
        import sys
        import kvstore

        sys.modules["s3fs"] = None
        for url in ("s3://bucket/kv", "simplecache::s3a://bucket/kv"):
            try:
                kvstore.open("ram://?capacity=4MiB", {"url": url, "name": "cold"})
            except kvstore.ConfigError as error:
                print(error)
        """
    )
    assert said.count("tier 'cold'") == said.count("pip install '.[s3]' in a clone of kvstore") == 2


def test_installed_command_says_its_version() -> None:
    command = Path(sys.executable).with_name("kvstore")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"kvstore \d+\.\d+\.\S+\n", done.stdout)
