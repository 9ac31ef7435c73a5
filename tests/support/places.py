"""Machines for a few seconds: network namespaces, and what joins them.

Nothing needs to be cleaned up: a namespace goes with the processes in it, and that which holds it ends with
the test's. They belong to a user namespace of their own, so that the caller need not be root where the system
lets anybody make one.
"""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from functools import cache

__all__ = ["Bridge", "Loopback", "Network", "why_no_namespaces", "why_no_netem"]

_OWN_USER = ["unshare", "--map-root-user", "--net", "--"]


@cache
def why_no_namespaces() -> str:
    """Why there can be no namespaces here; empty when there can."""
    try:
        done = subprocess.run([*_OWN_USER, "ip", "link"], capture_output=True, text=True)
    except FileNotFoundError as error:
        return f"no command {error.filename}"
    return "" if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()}"


@cache
def why_no_netem() -> str:
    """Why the kernel cannot delay and lose packets by itself here; empty when it can."""
    command = [*_OWN_USER, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"no netem: {done.stderr.strip()}"


class Network:
    """Namespaces that a subclass joins, each with one address; a context manager.

    Parameters
    ----------
    count : int
        How many; they are numbered from 0.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._stack = ExitStack()
        self._holders: list[int] = []  # process ids

    def __enter__(self) -> Network:
        with self._stack:  # also when something fails
            for _ in range(self._count):
                self.add_place()
            self.join()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, place: int) -> str:
        """Address of a place."""
        return f"10.77.0.{place + 1}"

    def prefix(self, place: int) -> list[str]:
        """What makes a command run there."""
        return ["nsenter", "-t", str(self._holders[place]), "-U", "--preserve-credentials", "-n", "--"]

    def run(self, place: int, command: str) -> str:
        """What a command there prints.

        Raises
        ------
        CalledProcessError
            It fails.
        """
        done = subprocess.run(
            [*self.prefix(place), *command.split()], check=True, capture_output=True, text=True
        )
        return done.stdout

    def add_place(self) -> int:
        """One more namespace, which nothing joins to the others."""
        command = [*_OWN_USER, "cat"]
        if self._holders:
            enter = ["nsenter", "-t", str(self._holders[0]), "-U", "--preserve-credentials", "--"]
            command = [*enter, "unshare", "--net", "--", "cat"]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._stack.enter_context(holder)
        self._stack.callback(holder.kill)
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"\n", "no namespace"
        self._holders.append(holder.pid)
        place = len(self._holders) - 1
        self.run(place, "ip link set lo up")
        return place

    def join(self) -> None:
        """Connect all places."""
        raise NotImplementedError

    def cut(self, place: int) -> None:
        """Let no packet from or to a place get through; nobody is told."""
        raise NotImplementedError

    def mend(self, place: int) -> None:
        """Let packets through again."""
        raise NotImplementedError


class Bridge(Network):
    """Each place has a cable to a switch, as the kernel has them."""

    def join(self) -> None:
        self._switch = switch = self.add_place()
        self.run(switch, "ip link add switch type bridge")
        self.run(switch, "ip link set switch up")
        for place in range(self._count):
            port = f"port{place}"
            self.run(switch, f"ip link add {port} type veth peer name cable netns {self._holders[place]}")
            self.run(switch, f"ip link set {port} master switch up")
            self.run(place, f"ip address add {self.host(place)}/24 dev cable")
            self.run(place, "ip link set cable up")

    def cut(self, place: int) -> None:
        self.run(self._switch, f"ip link set port{place} down")

    def mend(self, place: int) -> None:
        self.run(self._switch, f"ip link set port{place} up")

    def shape(self, place: int, how: str) -> None:
        """Let what goes to a place pass a queueing discipline of the kernel: its name and arguments."""
        self.run(self._switch, f"tc qdisc replace dev port{place} root {how}")

    def unshape(self, place: int) -> None:
        """Let it pass at once again."""
        self.run(self._switch, f"tc qdisc delete dev port{place} root")


class Loopback(Network):
    """One machine for all, where there can be no others; nothing can be cut."""

    def add_place(self) -> int:
        return 0

    def join(self) -> None:
        """They are joined."""

    def host(self, place: int) -> str:
        return "127.0.0.1"

    def prefix(self, place: int) -> list[str]:
        return []
