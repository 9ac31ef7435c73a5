"""A network whose every packet is passed on by hand, and lost, held up or kept back as a test wants it."""

from __future__ import annotations

import heapq
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from support.places import Network

__all__ = ["Relay"]

_DEVICE = "/dev/net/tun"
#: Opens the device of the place that it runs in, as ``cable``, and hands it over.
_OPEN = f"""
import fcntl, os, socket, struct, sys
device = os.open("{_DEVICE}", os.O_RDWR)
fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", b"cable", 0x1001))  # TUNSETIFF: IFF_TUN | IFF_NO_PI
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"."], [device])
"""
_LARGEST = 2048
_IPV4, _TCP = 4, 6
_SYN, _SYN_ACK = 0x02, 0x12


class Relay(Network):
    """Places whose packets pass through the test's process.

    Parameters
    ----------
    count : int
    seed : int
        Decides which packets are lost.

    Attributes
    ----------
    delay, jitter : float
        Seconds that each packet takes, and up to how much more; packets overtake one another.
    loss : float
        Share of packets that are lost.
    passed, lost : int
        Packets so far.
    dials : set of (int, int)
        Place and port of those who have tried to make a TCP connection.
    """

    def __init__(self, count: int, seed: int = 1) -> None:
        super().__init__(count)
        self.delay = self.jitter = self.loss = 0.0
        self.passed = self.lost = 0
        self.dials: set[tuple[int, int]] = set()
        self._random = random.Random(seed)
        self._devices: list[int] = []
        self._cut: set[tuple[int, int]] = set()
        self._late: list[tuple[float, int, int, bytes]] = []  # heap: when due, tie-break, where to, packet
        self._closed = threading.Event()

    @staticmethod
    def why_not() -> str:
        """Why there can be none here; empty when there can."""
        return "" if os.access(_DEVICE, os.R_OK | os.W_OK) else f"{_DEVICE} cannot be opened"

    def join(self) -> None:
        for place in range(self._count):
            self._devices.append(self._open_device(place))
            self._stack.callback(os.close, self._devices[place])
            self.run(place, f"ip address add {self.host(place)}/24 dev cable")
            self.run(place, "ip link set cable up")
        thread = threading.Thread(target=self._run, name="relay")
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(self._closed.set)

    def cut(self, place: int) -> None:
        others = set(range(self._count)) - {place}
        self._cut |= {way for other in others for way in ((place, other), (other, place))}

    def cut_way(self, source: int, target: int) -> None:
        """Let no packet get from one place to another; those of the opposite direction do."""
        self._cut |= {(source, target)}

    def mend(self, place: int) -> None:
        self._cut = {way for way in self._cut if place not in way}

    def _open_device(self, place: int) -> int:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [*self.prefix(place), sys.executable, "-c", _OPEN, str(theirs.fileno())]
            subprocess.run(command, check=True, pass_fds=[theirs.fileno()])
            _, [device], _, _ = socket.recv_fds(ours, 1, 1)
        os.set_blocking(device, False)
        return device

    def _run(self) -> None:
        poller = select.poll()
        for device in self._devices:
            poller.register(device, select.POLLIN)
        while not self._closed.is_set():
            pause = self._late[0][0] - time.monotonic() if self._late else 0.02
            for device, _ in poller.poll(min(max(0.0, pause), 0.02) * 1000):
                with suppress(BlockingIOError):
                    self._take(self._devices.index(device), os.read(device, _LARGEST))
            self._send_due()

    def _take(self, source: int, packet: bytes) -> None:
        if packet[0] >> 4 != _IPV4 or not 0 < packet[19] <= self._count:
            return
        target = packet[19] - 1
        if packet[9] == _TCP and packet[33] & _SYN_ACK == _SYN:
            self.dials.add((source, int.from_bytes(packet[20:22])))
        if (source, target) in self._cut or self._random.random() < self.loss:
            self.lost += 1
            return
        self.passed += 1
        due = time.monotonic() + self.delay + self.jitter * self._random.random()
        heapq.heappush(self._late, (due, self.passed, target, packet))

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._late)
            with suppress(OSError):  # its queue is full, as a switch's may be
                os.write(self._devices[target], packet)
