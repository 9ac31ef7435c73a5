"""Which hosts may be named, and which are this machine."""

from __future__ import annotations

import pytest

from kvstore.address import Address, is_allowed


@pytest.mark.parametrize(
    ("host", "patterns"),
    [
        ("::1%1:;[10.0.0.9", ("loopback",)),
        ("::1%lo", ("loopback", "::/0", "any")),
        ("fe80::1%eth0", ("fe80::/10", "any")),
    ],
)
def test_a_scope_matches_nothing(host: str, patterns: tuple[str, ...]) -> None:
    assert not is_allowed(host, patterns)
    assert is_allowed(host.partition("%")[0], patterns)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.0.1:1", "localhost:1", "[::1]:1", ":1"])
def test_addresses_of_this_machine(text: str) -> None:
    assert Address.parse(text).is_loopback


@pytest.mark.parametrize("text", ["127.evil.com:1", "10.0.0.1:1", "0.0.0.0:1", "[::]:1", "[::1%1]:1"])
def test_addresses_that_may_be_elsewhere(text: str) -> None:
    assert not Address.parse(text).is_loopback
