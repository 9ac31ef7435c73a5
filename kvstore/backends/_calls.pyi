"""One chunk's system calls and hash in one call, without the interpreter lock; written in C, ``_calls.c``."""

INTERFACE: int
"""Of what is said here: another number says that the module is of another version."""

def bind(path: str, /) -> None:
    """Use the hash functions of the shared library at `path`; ImportError where it has none."""

def digest(data: bytes, piece: int, /) -> bytes:
    """xxh3-128 of `data`, taken in so many bytes at a time, in canonical form: for a check of what
    :func:`bind` has found."""

def put(
    target: str, temp: str, mode: int, header: memoryview, payload: memoryview, digest_at: int, /
) -> bool:
    """Create the file `target` by way of `temp`, unless it exists; False where it does.

    The digest of `payload` goes to `digest_at` of the writable `header`, and then that of all before them to
    its last 16 bytes. OSError is about any of the calls; `temp` is gone then.
    """

def get(
    path: str, header: memoryview, out: memoryview, length_at: int, stamp_after: float, /
) -> tuple[int, bytes] | None:
    """Scatter the file `path` over `header` and `out`, both writable; None where there is none.

    Returns how many bytes came, at most 4096 more than fit, and the digest of as much of `out` as the
    little-endian 64-bit number at `length_at` of the header says. A file that was last modified more than
    `stamp_after` seconds ago, if that is not 0, is modified now.
    """
