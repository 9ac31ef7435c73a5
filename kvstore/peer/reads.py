"""What a client reads past the carrier: for which calls, by which reader, and when that is beyond hope.

All of it belongs to the thread of :class:`~kvstore.peer.client.PeerClient`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import zmq

from ..errors import KVStoreError
from ..frame import HEADER_SIZE
from .calls import Arrived, Call
from .protocol import MOST_OFFERS
from .session import Offered
from .transport import ClientCarrier, Read, Reader, Tag, Wanted

__all__ = ["Reads"]

#: Sessions in a row that a reader which has worked may end before it is given up.
_CREDIT = 3
_NOWHERE = memoryview(bytearray(1))


class Reads:
    """Reads that are under way, by the reader of the session.

    Parameters
    ----------
    readers : sequence of Reader
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = {reader.name: reader for reader in readers}
        self._reader: Reader | None = None
        self._calls: dict[Tag, Call] = {}
        self._headers = memoryview(bytearray(MOST_OFFERS * HEADER_SIZE))
        self._credits: Counter[str] = Counter()  # sessions that each may still end; none before it has worked

    def __len__(self) -> int:
        return len(self._calls)

    def attach(self, poller: zmq.Poller) -> None:
        """Use `poller` to wake the thread."""
        for reader in self._readers.values():
            reader.attach(poller)

    def turn_to(self, transport: str, metadata: bytes) -> None:
        """Read from the server of a new session, by `transport` if that needs a reader.

        Raises
        ------
        OSError
            It cannot be reached.
        """
        self._reader = self._readers.get(transport)
        if self._reader is not None:
            self._reader.connect(metadata)

    @property
    def way(self) -> str:
        """Name of the reader of the session; empty for none."""
        return "" if self._reader is None else self._reader.name

    @property
    def next_deadline(self) -> float:
        """None is overdue before this time."""
        return min((call.deadline for call in self._calls.values()), default=float("inf"))

    def take(self, offered: Offered, carrier: ClientCarrier, calls: Sequence[Call]) -> list[tuple[Tag, Call]]:
        """Begin to read what is offered for `calls`, whose headers `carrier` has.

        Returns those calls for which nothing is to be read: what is no frame of ours, its size will tell.
        """
        length = offered.headers * HEADER_SIZE
        assert self._reader is not None  # whose name the session has agreed on
        is_whole = carrier.take(self._headers[:length], _NOWHERE) == length
        wanted, over = [], []
        for (number, place, size, address), call in zip(offered.chunks, calls, strict=True):
            assert call.buffers is not None
            tag, (header, payload) = (offered.id, place), call.buffers
            header[:] = self._headers[number * HEADER_SIZE :][:HEADER_SIZE]
            call.arrived = Arrived(HEADER_SIZE + size if is_whole else 0)
            if is_whole and 0 < size <= payload.nbytes:
                self._calls[tag] = call
                wanted.append(Wanted(tag, address, payload[:size]))
            else:
                over.append((tag, call))
        if wanted:
            self._reader.start(wanted)
        return over

    def ended(self) -> Iterator[tuple[Read, Call]]:
        """Go on with all; those that have ended since the last look, unless they went with one before."""
        if self._reader is None:
            return
        for read in self._reader.finished():
            call = self._calls.pop(read.tag, None)
            if call is None:
                continue
            if not read.error:
                assert call.arrived is not None
                call.arrived = Arrived(call.arrived.size, read.digest)
                self._credits[self.way] = _CREDIT
            yield read, call

    def drop_overdue(self, now: float, error: KVStoreError) -> bool:
        """Fail what is overdue, where nothing can be written for it any more; whether there was any."""
        dropped = False
        for tag, call in list(self._calls.items()):
            if now >= call.deadline and self._reader is not None and self._reader.drop(tag):
                del self._calls[tag]
                call.fail(error)
                dropped = True
        return dropped

    def is_stuck(self, now: float) -> bool:
        """Whether something is overdue that cannot be dropped, by a reader that has never worked: the way to
        the server's memory may lead through a filter that says nothing."""
        return now >= self.next_deadline and self._credits[self.way] <= 0

    def blame(self, *, once: bool) -> bool:
        """The reader has failed; whether it is beyond hope: it has never worked, or works no more. Charged
        `once` for a session, however many reads went with it."""
        self._credits[self.way] -= once
        return self._credits[self.way] <= 0

    def end(self, error: KVStoreError) -> None:
        """Let no read go on, and fail those for which none can be written any more."""
        adrift = {tag for reader in self._readers.values() for tag in reader.disconnect()}
        for tag, call in self._calls.items():
            if tag not in adrift:
                call.fail(error)
        self._calls.clear()
