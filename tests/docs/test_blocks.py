"""Runs every block of README.md and docs/: what a reader may paste must work.

By the tag of the block:

- ``python``: executed; the blocks of a page share one module, in order.
- ``pycon``: a session with ``>>>``; what it shows is compared, with ``...`` for what varies.
- ``bash``: executed with ``bash -euo pipefail``; the commands of this environment come first.
- ``toml``: a configuration that kvstore accepts. ``json``: well-formed.
- ``text``: output or a picture; not run.

Each page has an empty directory of its own. An HTML comment on the line above a block can say ``file: NAME``
(the block is written there; a script then runs where a later block calls it) or ``skip: REASON`` (it is not
run, and a test that is skipped says why).
"""

from __future__ import annotations

import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from kvstore.config import StoreConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])

_BLOCK = re.compile(
    r"(?:^<!-- (?P<order>file|skip): (?P<argument>[^\n]+) -->\n)?"
    r"^```(?P<tag>[^\n]*)\n(?P<source>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block; `line` is that of its first source line, counted from 1."""

    page: Path
    line: int
    tag: str
    source: str
    file: str
    skip: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("source")) + 1
        given = {match["order"]: match["argument"]}
        yield Block(page, line, match["tag"], match["source"], given.get("file", ""), given.get("skip", ""))


def run_python(block: Block, module: ModuleType) -> None:
    code = compile("\n" * (block.line - 1) + block.source, str(block.page), "exec")
    exec(code, module.__dict__)


def run_session(block: Block, module: ModuleType) -> None:
    test = doctest.DocTestParser().get_doctest(block.source, {}, block.place, str(block.page), block.line)
    test.globs = module.__dict__
    failures: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=failures.append, clear_globs=False)
    assert not failures, "".join(failures)


def run_bash(block: Block, module: ModuleType) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.source],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"{block.place}\n{done.stdout}\n{done.stderr}"


RUNNERS: dict[str, Callable[[Block, ModuleType], object]] = {
    "bash": run_bash,
    "json": lambda block, _: json.loads(block.source),
    "pycon": run_session,
    "python": run_python,
    "text": lambda _block, _module: None,
    "toml": lambda block, _: StoreConfig.from_toml(block.source),
}
SKIPPED = [block for page in PAGES for block in blocks(page) if block.skip]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks(page):
        assert block.tag in RUNNERS, f"{block.place}: no such tag: {block.tag!r}"
        if block.file:
            Path(block.file).write_text(block.source, encoding="utf-8")
        if not block.skip and not (block.file and block.tag == "python"):
            RUNNERS[block.tag](block, module)


@pytest.mark.parametrize("block", SKIPPED, ids=lambda block: block.place)
def test_block_that_is_not_run_says_why(block: Block) -> None:
    pytest.skip(block.skip)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"#]+)", prose)
    absent = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not absent


def test_every_fence_is_a_block() -> None:
    """An unclosed or indented fence would never be run."""
    for page in PAGES:
        fences = page.read_text(encoding="utf-8").count("```")
        assert fences == 2 * len(list(blocks(page))), page
