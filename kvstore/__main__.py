"""``kvstore`` and ``python -m kvstore``: the command line, which may be interrupted while it is imported."""

import os
import signal

__all__ = ["main"]


def main() -> None:
    """Entry point of ``kvstore``; ends the process."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, _leave)
    from . import cli

    cli.main()


def _leave(_number: int, _frame: object) -> None:
    """End at once: an exception could be lost in the middle of an import, and nothing has been begun."""
    os.write(2, b"kvstore: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
