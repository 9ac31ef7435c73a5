"""The tables of the reference pages say what the code says.

Each is rendered here from the code and must stand on its page as it is; a failure shows the table to paste.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import kvstore
from kvstore import errors
from kvstore.cli import COMMANDS
from kvstore.config import OPTIONS, SETTINGS, Option
from kvstore.metrics import COUNTERS, HISTOGRAMS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: object) -> str:
    return f"`{text}`"


def summary(thing: object) -> str:
    """First sentence of a docstring, in Markdown."""
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0]
    plain = re.sub(r":\w+:`(?:[^`<]*<)?\.?([^`>]*)>?`", r"`\1`", sentence)
    return re.sub(r"`+([^`]+)`+", r"`\1`", plain)


def default(option: Option) -> str:
    return "" if option.default in (None, "") else code(option.format(option.default))


def options(group: str) -> str:
    found = [option for option in OPTIONS.values() if option.tiers == group and option.available]
    rows = [(code(o.name), default(o), code(f"{o.name}={o.example}"), o.help) for o in found]
    return table(("Option", "Default", "Example", "Meaning"), rows)


def settings() -> str:
    rows = [(code(o.name), default(o), code(o.example), o.help) for o in SETTINGS.values()]
    return table(("Setting", "Default", "Example", "Meaning"), rows)


def exceptions() -> str:
    found = [getattr(errors, name) for name in errors.__all__]
    rows = [
        (code(e.__name__), code(e.kind), ", ".join(code(base.__name__) for base in e.__bases__), summary(e))
        for e in found
    ]
    return table(("Exception", "`kind`", "Is a", "Meaning"), rows)


def names() -> str:
    found = [name for name in kvstore.__all__ if not name.endswith("Error")]
    return table(("Name", "What it is"), ((code(name), summary(getattr(kvstore, name))) for name in found))


def methods() -> str:
    members = [item for part in kvstore.Store.__mro__ for item in vars(part).items()]
    found = [(name, m) for name, m in members if inspect.isfunction(m) and name[0] != "_"]
    internal = {"pump", "wait_until"}  # for jobs, leases and the idle pump
    rows = [(code(f"{name}{_signature(m)}"), summary(m)) for name, m in found if name not in internal]
    return table(("Call", "What it does"), rows)


def _signature(function: object) -> str:
    """Names and defaults of the parameters; the types are in the code."""
    parameters = list(inspect.signature(function).parameters.values())[1:]  # type: ignore[arg-type]
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(plain))


TABLES = {
    "options of every tier": ("configuration.md", options("every")),
    "options of the host tier": ("configuration.md", options("host")),
    "options of secondary tiers": ("configuration.md", options("secondary")),
    "options of file tiers": ("configuration.md", options("file")),
    "options of peers": ("configuration.md", options("peer")),
    "options of both sides of peers": ("configuration.md", options("ram peer")),
    "options of file and s3 tiers": ("configuration.md", options("file s3 s3a")),
    "settings": ("configuration.md", settings()),
    "exceptions": ("errors.md", exceptions()),
    "counters": ("metrics.md", table(("Counter", "Counts"), ((code(k), v) for k, v in COUNTERS.items()))),
    "histograms": (
        "metrics.md",
        table(("Histogram", "Measures"), ((code(k), v) for k, v in HISTOGRAMS.items())),
    ),
    "names": ("python-api.md", names()),
    "methods": ("python-api.md", methods()),
}


@pytest.mark.parametrize(("page", "expected"), TABLES.values(), ids=TABLES.keys())
def test_table_stands_on_its_page(page: str, expected: str) -> None:
    assert expected in (REFERENCE / page).read_text(encoding="utf-8"), f"\n{expected}"


def test_options_to_come_are_listed() -> None:
    coming = ", ".join(code(option.name) for option in OPTIONS.values() if not option.available)
    assert coming in (REFERENCE / "configuration.md").read_text(encoding="utf-8"), coming


def test_commands_are_described() -> None:
    page = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    heads = " ".join(re.findall(r"^## (.+)$", page, re.MULTILINE)).split()
    assert set(COMMANDS) <= set(heads)
    rows = re.findall(r"^\| (\[`.+?\)) \|", page, re.MULTILINE)
    assert set(COMMANDS) == {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_index_links_every_page() -> None:
    docs = REFERENCE.parent
    linked = set(re.findall(r"\]\(([^):]+\.md)\)", (docs / "index.md").read_text(encoding="utf-8")))
    pages = {str(page.relative_to(docs)) for page in docs.glob("**/*.md")} - {"index.md"}
    assert pages <= linked, pages - linked


def test_gauges_of_statistics_are_described() -> None:
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    for struct in (kvstore.Stats, kvstore.TierStats):
        absent = [name for name in struct.__struct_fields__ if f"`{name}`" not in page]
        assert not absent


def test_leases_are_described() -> None:
    page = (REFERENCE / "python-api.md").read_text(encoding="utf-8")
    public = {
        name
        for lease in (kvstore.ReadLease, kvstore.WriteLease)
        for name, _ in inspect.getmembers(lease)
        if not name.startswith("_") and name != "resolve"  # the store's side of a lease
    }
    absent = [name for name in public if f"`{name}" not in page]
    assert not absent
