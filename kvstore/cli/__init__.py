"""The command line ``kvstore``.

Each command is a module of this package with a function ``run``, whose parameters are the command's and whose
docstring is its help. It returns its exit code; None is 0. To add one, write the module and add its name to
:data:`COMMANDS`. A module is imported when its command runs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.main import get_command

from ..errors import ConfigError, KVStoreError
from ..remedies import nearest
from ._storage import explain

__all__ = ["COMMANDS", "execute", "main"]

COMMANDS = (
    "demo",
    "replay",
    "simulate",
    "ls",
    "stat",
    "verify",
    "prune",
    "copy",
    "warm",
    "conformance",
    "bench",
    "serve",
)
"""Names of the commands, in the order of the help."""

#: Seconds that a command gets for cleaning up before another Ctrl-C can interrupt that.
_CLEANING = 10.0
_FAILED, _MISUSED, _INTERRUPTED = 1, 2, 130
#: Base of typer's errors of usage; found this way because its module differs between versions of typer.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0].__bases__[0]


class _Command(TyperCommand):
    """Its help shows no types of Python: names of values say more, and a flag has none."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Commands(TyperGroup):
    """Imports commands by name; its help is like theirs."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in COMMANDS:
            ctx.fail(f"there is no command {name!r}; {nearest(name, COMMANDS)}")
        run = import_module(f".{name}", __name__).run
        single = typer.Typer(add_completion=False)
        single.command(name, cls=_Command, help=_unwrap(run.__doc__))(run)
        return get_command(single)


_app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _without_types(params: list[Any]) -> list[Any]:
    for param in params:
        if isinstance(param, TyperArgument):
            vars(param)["display_type_rich"] = lambda ctx: None
        elif param.is_flag:
            param.metavar = ""
    return params


def _unwrap(text: str) -> str:
    """`text` with one line for each paragraph, as rich expects it."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _print_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(f"kvstore {__version__}")
        raise typer.Exit


@_app.callback(
    invoke_without_command=True,
    epilog="Exit codes: 0 all is well, 1 a problem was found, 2 wrong usage or configuration.",
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A tiered store for chunks of KV cache: host memory over any storage. Start with: kvstore demo"""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command that the arguments of the process give; ends the process."""
    unwind = _Unwinding()
    signal.signal(signal.SIGTERM, unwind)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, unwind)
    try:
        sys.exit(execute(sys.argv[1:]))
    finally:
        unwind.finish()


class _Unwinding:
    """Signal handler that ends a command by an exception, so that temporary directories go.

    They go although somebody presses Ctrl-C again meanwhile.
    """

    def __init__(self) -> None:
        self._deaf_until = 0.0

    def __call__(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if now < self._deaf_until:
            return
        self._deaf_until = now + _CLEANING
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    def finish(self) -> None:
        """Ignore what comes from now on: an interpreter that ends drops handlers, and would die of it."""
        if self._deaf_until:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def execute(arguments: Sequence[str]) -> int:
    """Run a command; errors become one line on stderr.

    Parameters
    ----------
    arguments : sequence of str
        What follows ``kvstore``.

    Returns
    -------
    int
        0, 1 when a problem was found or something failed, 2 when the usage or the configuration is wrong, 130
        after Ctrl-C.
    """
    try:
        code = _flushed(_app(args=list(arguments), prog_name="kvstore", standalone_mode=False) or 0)
    except ConfigError as error:
        return _complain(str(error), _MISUSED)
    except _UsageError as error:
        return _complain(_explain(error), _MISUSED)
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except KVStoreError as error:
        return _complain(str(error), _FAILED)
    except OSError as error:
        return _complain(explain(error), _FAILED)
    except Exception as error:  # clients of storage raise classes of their own
        return _complain(f"{type(error).__name__}: {error}", _FAILED)
    return _complain("interrupted", code) if code == _INTERRUPTED else int(code)


def _flushed(code: int) -> int:
    """`code` once all output has gone; 1 when its reader has gone away before."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python flushes once more at its end
        return _FAILED
    return code


def _explain(error: Any) -> str:
    """An error of usage, with the way to the command's help."""
    context = getattr(error, "ctx", None)
    hint = f" (see: {context.command_path} --help)" if context is not None else ""
    return f"{error.format_message().rstrip('.')}{hint}"


def _complain(message: str, code: int) -> int:
    print(f"kvstore: {' '.join(message.split())}", file=sys.stderr)
    return code
