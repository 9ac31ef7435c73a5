"""The POSIX backend with all that is done to the file of a chunk in one compiled call each.

A worker thread then meets the interpreter lock once for each chunk instead of about ten times, and neither
waits for it between two system calls nor keeps others waiting. It is a short cut through the usual case, no
other behaviour: what the call does not know, and what it fails at, goes by the steps of :mod:`.posix`.

The compiled part is built when the package is installed where there is a C compiler with Python's headers.
Where there was none, or where the xxhash package does not show the functions that it needs, tiers work
without it, slower. So they do with ``KVSTORE_COMPILED=off`` in the environment.
"""

from __future__ import annotations

import os
from functools import cache

from xxhash import xxh3_128_digest

from .. import frame
from ..errors import ConfigError
from . import publish
from .layout import temp_name
from .posix import STAMP_EVERY, PosixBackend

_import_error: ImportError | None = None
try:
    from . import _calls
except ImportError as error:
    _import_error = error

__all__ = ["COMPILED_VARIABLE", "CompiledBackend", "why_not"]

COMPILED_VARIABLE = "KVSTORE_COMPILED"

_INTERFACE = 1  # of the compiled part that this module calls


class CompiledBackend(PosixBackend):
    """As :class:`PosixBackend`, with the same parameters; only where :func:`why_not` has nothing to say."""

    def read_into(self, key: bytes, out: memoryview) -> int | None:
        if self._direct:
            return super().read_into(key, out)
        header = self._scratch.header
        stamp_after = STAMP_EVERY if self._stamps else 0.0
        found = _calls.get(self._object_path(key), header, out, frame.LENGTH_OFFSET, stamp_after)
        if found is None:
            return None
        size, digest = found
        return frame.verify(header, out, size, key=key, fingerprint=self.context.fingerprint, digest=digest)

    def write(self, key: bytes, view: memoryview) -> bool:
        if self._publisher or self._masked or self._direct or self._durability != "none":
            return super().write(key, view)
        header = self._scratch.header
        frame.draft(header, view.nbytes, key=key, fingerprint=self.context.fingerprint)
        target = self._object_path(key)
        try:
            return _calls.put(target, temp_name(target), self._mode, header, view, frame.DIGEST_OFFSET)
        except FileNotFoundError:  # its directory is missing
            pass
        except OSError as error:
            if error.errno not in publish.UNSUPPORTED:
                raise
        return super().write(key, view)


def why_not() -> str:
    """Why tiers cannot have the compiled calls here; empty when they can.

    Raises
    ------
    ConfigError
        The environment variable is neither ``on`` nor ``off``.
    """
    wanted = os.environ.get(COMPILED_VARIABLE, "on")
    if wanted not in ("on", "off"):
        raise ConfigError(f"{COMPILED_VARIABLE} is 'on' or 'off', not {wanted!r}")
    return f"{COMPILED_VARIABLE}=off" if wanted == "off" else _obstacle()


@cache
def _obstacle() -> str:
    if _import_error is not None:
        return f"its compiled part was not built, or cannot be loaded: {_import_error}"
    if getattr(_calls, "INTERFACE", 0) != _INTERFACE:
        return "its compiled part is of another version; install it again"
    try:
        import xxhash._xxhash as library

        _calls.bind(library.__file__)
    except ImportError as error:
        return str(error)
    sample = bytes(range(251)) * 4000
    lengths = (0, 1, 9, 100, 200, 300, 4080, len(sample))  # xxh3 has other ways for other lengths
    for data in (sample[:length] for length in lengths):
        for piece in (len(sample), 1 << 18, 1000):
            if _calls.digest(data, piece) != xxh3_128_digest(data):
                return "the functions of xxhash do not do what they should"
    return ""
