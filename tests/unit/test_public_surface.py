"""The public surface: what is public is in ``__all__``, exists, and has a docstring that fits it."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvstore
import kvstore_vllm
from kvstore.config import OPTIONS, SETTINGS


def _modules() -> list[str]:
    found = [package.__name__ for package in (kvstore, kvstore_vllm)]
    for package in (kvstore, kvstore_vllm):
        found += [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [name for name in found if not any(part.startswith("_") for part in name.split("."))]


def _load(name: str) -> Any:
    """The module as a parameter; one that is skipped where what it needs, such as vLLM, is not installed."""
    try:
        module = importlib.import_module(name)
        for lazy in getattr(module, "__all__", ()):
            getattr(module, lazy, None)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("torch", "vllm"):
            raise
        return pytest.param(None, marks=pytest.mark.skip(reason=f"needs {missing} (tox -e vllm)"), id=name)
    return pytest.param(module, id=name)


every_module = pytest.mark.parametrize("module", [_load(name) for name in _modules()])


def _defined(module: ModuleType) -> Iterator[str]:
    """Names that the module's own statements bind at its top level; imports are not among them."""
    for node in ast.parse(Path(module.__file__ or "").read_bytes()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def _parameters(thing: Any) -> set[str]:
    """Names that a call of `thing` takes; a metaclass may hide those of a class."""
    found = set(inspect.signature(thing).parameters)
    return found | set(inspect.signature(thing.__init__).parameters) if inspect.isclass(thing) else found


def _exported(module: ModuleType) -> list[str]:
    """The module's ``__all__``, which a module that is but a docstring need not have."""
    return list(module.__all__ if set(_defined(module)) else [])


def _public_members(thing: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(thing).items():
        if name.startswith(("_", "test_")):  # the names of tests say what they show
            continue
        if isinstance(member, property | classmethod | staticmethod):
            yield name, member.fget if isinstance(member, property) else member.__func__
        elif inspect.isfunction(member):
            yield name, member


def _public_things(module: ModuleType) -> Iterator[tuple[str, Any, str]]:
    """Place, thing and docstring of every public class, function and method that the module defines."""
    for name in set(_defined(module)) & set(_exported(module)):
        thing = getattr(module, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        yield name, thing, thing.__doc__ or ""
        if inspect.isclass(thing):
            for member_name, member in _public_members(thing):
                # an override need not repeat what its base says
                yield f"{name}.{member_name}", member, inspect.getdoc(getattr(thing, member_name)) or ""


def _sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    kind = 0 if name.isupper() else 1 if name[0].isupper() else 2
    return kind, name


@every_module
def test_all_is_sorted_and_every_name_exists(module: ModuleType) -> None:
    names = _exported(module)
    assert names == sorted(names, key=_sort_key)
    assert len(names) == len(set(names))
    assert not [name for name in names if not hasattr(module, name)]


@every_module
def test_all_names_what_is_public_and_nothing_private(module: ModuleType) -> None:
    assert not [name for name in _exported(module) if name.startswith("_")]
    assert not [name for name in _defined(module) if name[0] != "_" and name not in _exported(module)]


@every_module
def test_modules_and_what_they_offer_have_docstrings(module: ModuleType) -> None:
    assert (module.__doc__ or "").strip()
    assert not [place for place, _, doc in _public_things(module) if not doc.strip()]


@every_module
def test_summaries_are_sentences(module: ModuleType) -> None:
    summaries = (
        (place, inspect.cleandoc(doc).partition("\n\n")[0]) for place, _, doc in _public_things(module)
    )
    assert not [place for place, text in summaries if text and not text.endswith((".", ":", "?"))]


@every_module
def test_documented_parameters_are_parameters(module: ModuleType) -> None:
    wrong = []
    for place, thing, doc in _public_things(module):
        section = re.search(r"^Parameters\n-+\n(.*?)(?:\n\n\w+\n-+\n|\Z)", inspect.cleandoc(doc), re.S | re.M)
        if section is None:
            continue
        heads = re.findall(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: : .*)?$", section[1], re.M)
        documented = [name.lstrip("*") for head in heads for name in head.split(", ")]
        wrong += [f"{place}: {name}" for name in documented if name not in _parameters(thing)]
    assert not wrong


@pytest.mark.parametrize("option", [*OPTIONS.values(), *SETTINGS.values()], ids=lambda option: option.name)
def test_options_explain_themselves(option: Any) -> None:
    """One that is available has a sentence of help, and an example that it accepts."""
    if option.available:
        assert option.help.endswith(".")
        option.parse(option.example, "here")


def test_names_are_imported_when_somebody_asks_for_them() -> None:
    """A worker process needs few of them. (Here all are known by now, so another process looks.)"""
    code = (
        "import sys, kvstore\n"
        "assert {*kvstore.__all__, '__version__'} <= set(dir(kvstore))\n"
        "before = [name for name in sys.modules if name.startswith('kvstore.')]\n"
        "assert kvstore.ConfigError is kvstore.ConfigError\n"
        "after = [name for name in sys.modules if name.startswith('kvstore.')]\n"
        "print(before, after, hasattr(kvstore, 'nonsense'), kvstore.__version__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    version = importlib.metadata.version("kvstore-tiers")
    assert done.stdout == f"[] ['kvstore.errors'] False {version}\n"


def test_import_is_light() -> None:
    """Importing the library loads no client of a storage, no accelerator library, no command line."""
    heavy = {
        "fsspec",
        "s3fs",
        "torch",
        "vllm",
        "typer",
        "rich",
        "matplotlib",
        "prometheus_client",
        "asyncssh",
    }
    code = "import sys, kvstore_vllm; from kvstore import *; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not heavy & set(done.stdout.split())


def test_opening_local_tiers_loads_no_filesystem_library(tmp_path: Any) -> None:
    code = (
        "import sys, kvstore\n"
        f"with kvstore.open('ram://?capacity=1MiB', {str(tmp_path)!r}, chunk_size='64KiB') as store:\n"
        "    store.get(store.add(b'x'))\n"
        "print(*sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"fsspec", "torch", "vllm"} & set(done.stdout.split())
