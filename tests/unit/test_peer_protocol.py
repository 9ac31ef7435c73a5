"""Messages between peers: bounds, versions, proofs; bytes that are none never raise."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.address import Address
from kvstore.errors import ConfigError
from kvstore.namespace import Namespace
from kvstore.peer import protocol
from kvstore.peer.admission import ServerIdentity
from kvstore.peer.credentials import ClientCredentials, ServerCredentials
from kvstore.peer.hub import Hub
from kvstore.peer.protocol import CONTROL_LIMIT, MOST_KEYS, Fetch, Hello, Lookup, Refused, Request, encode
from kvstore.peer.session import ClientIdentity, ClientSession, Opened, Rejected, State

SPACE = Namespace({"model": "m"}, 4096)
HELLO = Hello(7, protocol.VERSION, bytes(16), SPACE.fingerprint, 4096, SPACE.manifest, ["zmq"])
KEY = bytes(range(16))


def make_hub(token: bytes = b"") -> Hub:
    return Hub(ServerIdentity(SPACE.fingerprint, SPACE.chunk_size, SPACE.check_manifest, token))


def make_client(space: Namespace = SPACE, token: bytes = b"") -> ClientSession:
    return ClientSession(ClientIdentity(space.fingerprint, space.chunk_size, space.manifest, token))


def talk(client: ClientSession, hub: Hub) -> object:
    """Carry every message until nobody has anything to say; the client's last event."""
    last = None
    while client.outbox or hub.to_peers:
        while client.outbox:
            hub.received(b"p", encode(client.outbox.popleft()), 0.0)
        while hub.to_peers:
            last = client.received(encode(hub.to_peers.popleft()[1])) or last
    return last


# Bytes.

MESSAGES = [
    HELLO,
    protocol.Proof(7, bytes(32)),
    Lookup(7, 1, [KEY]),
    Fetch(7, 2, [KEY], 10, 100),
    protocol.Ack(7, 2, [0]),
    protocol.Cancel(7, 2),
    protocol.Goodbye(7),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_request_leads_back(message: Request) -> None:
    assert protocol.decode_request(encode(message)) == message


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"\x91" * 100_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(bytes(CONTROL_LIMIT + 1))
def test_random_bytes_never_raise_and_are_counted(data: bytes) -> None:
    hub, client = make_hub(), make_client()
    client.greet(1.0)
    hub.received(b"p", data, 0.0)
    assert client.received(data) is None
    assert (hub.counters["malformed"], client.counters["malformed"]) == (1, 1)
    assert not (hub.to_peers or hub.to_owner or client.state is State.OPEN)


@settings(deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_never_raise(message: Request, data: st.DataObject) -> None:
    """Of a message of ours some bytes are changed, or its end is missing."""
    hub = make_hub()
    hub.received(b"p", encode(HELLO), 0.0)
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    hub.received(b"p", bytes(damaged[: data.draw(st.integers(0, len(damaged)))]), 0.0)
    hub.expire(1e9)
    assert hub.leases == 0


@settings(deadline=None)
@given(st.recursive(st.none() | st.integers() | st.binary(max_size=40) | st.text(max_size=9), st.lists))
def test_wellformed_msgpack_that_is_no_message_never_raises(content: object) -> None:
    hub, client = make_hub(), make_client()
    client.greet(1.0)
    try:
        data = msgspec.msgpack.encode(["Lookup", 7, content])
    except OverflowError:
        return
    hub.received(b"p", data, 0.0)
    assert client.received(data) is None


@pytest.mark.parametrize(
    "message",
    [
        Lookup(7, 1, []),
        Lookup(7, 1, [KEY] * (MOST_KEYS + 1)),
        Lookup(7, 1, [bytes(65)]),
        Lookup(-1, 1, [KEY]),
        Fetch(7, 1, [KEY], 0, 10**9),
        protocol.Ack(7, 1, [MOST_KEYS]),
        msgspec.structs.replace(HELLO, nonce=b"short"),
        msgspec.structs.replace(HELLO, manifest=bytes(65 << 10)),
    ],
)
def test_what_is_out_of_bounds_is_no_message(message: Request) -> None:
    assert protocol.decode_request(encode(message)) is None


def test_the_largest_messages_fit() -> None:
    keys = [number.to_bytes(64) for number in range(MOST_KEYS)]
    for message in (Lookup(7, 1, keys), Fetch(7, 1, keys, 1, 1)):
        assert len(encode(message)) <= CONTROL_LIMIT
        assert protocol.decode_request(encode(message)) == message


# Hello.


def test_another_version_is_refused_by_name_whatever_else_it_sends() -> None:
    newer = msgspec.msgpack.decode(encode(HELLO))
    newer[2] = 99
    hub = make_hub()
    hub.received(b"p", msgspec.msgpack.encode([*newer, {"of": "the future"}]), 0.0)
    ((_, refused),) = hub.to_peers
    assert refused == Refused(7, "version", "version: found 99, expected 1")


def test_another_namespace_is_refused_with_the_fields_that_differ() -> None:
    other = Namespace({"model": "other", "dtype": "bfloat16"}, 4096)
    client = make_client(other)
    client.greet(1.0)
    event = talk(client, make_hub())
    assert isinstance(event, Rejected)
    assert event.reason == "namespace"
    assert '"other", expected "m"' in event.detail
    assert "dtype" in event.detail
    assert client.state is State.CLOSED


@pytest.mark.parametrize(
    ("ours", "theirs", "opens"),
    [
        (b"", b"", True),
        (b"a shared token 12", b"a shared token 12", True),
        (b"a shared token 12", b"another token 123", False),
        (b"", b"a shared token 12", False),
        (b"a shared token 12", b"", False),
    ],
)
def test_tokens_are_proved_by_both_sides(ours: bytes, theirs: bytes, opens: bool) -> None:
    client, hub = make_client(token=ours), make_hub(theirs)
    client.greet(1.0)
    event = talk(client, hub)
    assert (client.state is State.OPEN) is opens
    if not opens:
        assert isinstance(event, Rejected)
        assert event.reason == "authentication"


def with_transports(*names: str) -> ClientSession:
    return ClientSession(ClientIdentity(SPACE.fingerprint, 4096, SPACE.manifest, transports=names))


@pytest.mark.parametrize(
    ("asked", "offered", "taken"),
    [
        (("zmq",), ("nixl", "zmq"), "zmq"),
        (("zmq", "nixl"), ("nixl", "zmq"), "nixl"),
        (("nixl", "zmq"), ("zmq",), "zmq"),
        (("nixl",), ("zmq",), None),
        ((), ("zmq",), None),
    ],
)
def test_the_server_takes_the_best_transport_that_both_have(
    asked: tuple[str, ...], offered: tuple[str, ...], taken: str | None
) -> None:
    offers = {name: name.encode() for name in offered}
    identity = ServerIdentity(SPACE.fingerprint, 4096, SPACE.check_manifest, offers=offers)
    client = with_transports(*asked)
    client.greet(1.0)
    event = talk(client, Hub(identity))
    if taken is None:
        detail = f"transport: found {list(asked)}, expected one of {list(offered)}"
        assert event == Rejected("transport", detail)
    else:
        assert event == Opened(taken, offers[taken])


def test_an_offer_is_for_those_who_asked_for_it() -> None:
    """A server cannot make a client read its memory, nor take a transport that the client does not have."""
    for transport in ("zmq", "nixl"):
        client = with_transports("zmq")
        client.greet(1.0)
        session = client.outbox[0].session
        event = client.received(encode(protocol.Welcome(session, protocol.VERSION, b"", transport, b"")))
        if transport == "nixl":
            assert event == Rejected("transport", "transport: found 'nixl'")
            continue
        number = client.fetch([KEY], 1.0, 1.0, 0.0)
        assert client.received(encode(protocol.Offer(session, number, [(0, 4096, 4096)]))) is None
        assert client.counters["unexpected"] == 1
        assert client.received(encode(protocol.Chunk(session, number, 0, 4096))) is not None


def test_a_transport_that_was_given_up_is_asked_for_no_more() -> None:
    client = with_transports("nixl", "zmq")
    client.greet(1.0)
    assert client.give_up("nixl")
    assert client.state is State.CLOSED
    client.greet(1.0)
    hello = client.outbox[-1]
    assert isinstance(hello, Hello)
    assert hello.transports == ["zmq"]
    assert not client.give_up("zmq"), "there is no other"


def test_fields_are_named_only_to_those_who_know_the_token() -> None:
    client = make_client(Namespace({"model": "spy"}, 4096), token=b"a wrong token 123")
    client.greet(1.0)
    event = talk(client, make_hub(b"the right token 1"))
    assert isinstance(event, Rejected)
    assert "model" not in event.detail


def test_a_proof_cannot_be_replayed() -> None:
    """To a server that draws another nonce, the recorded conversation of a client is worth nothing."""
    token, recorded = b"a shared token 12", []
    client, hub = make_client(token=token), make_hub(token)
    client.greet(1.0)
    while client.outbox or hub.to_peers:
        while client.outbox:
            recorded.append(encode(client.outbox.popleft()))
            hub.received(b"p", recorded[-1], 0.0)
        while hub.to_peers:
            client.received(encode(hub.to_peers.popleft()[1]))
    assert client.state is State.OPEN
    again = make_hub(token)
    for data in recorded:
        again.received(b"spy", data, 0.0)
    assert isinstance(again.to_peers[-1][1], Refused)


def test_a_request_before_the_session_is_open_is_not_heard() -> None:
    hub = make_hub(b"a shared token 12")
    hub.received(b"p", encode(HELLO), 0.0)
    hub.received(b"p", encode(Lookup(7, 1, [KEY])), 0.0)
    assert not hub.to_owner
    assert hub.counters["unexpected"] == 1


# Configuration.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"password": "x"}, "unknown 'password'"),
        ({"token": "short"}, "at least 16"),
        ({"token": 5}, "at least 16"),
        ({"curve_server_key": "x" * 40}, "takes all of"),
        ({"curve_server_key": "x"}, "keys of 40"),
    ],
)
def test_credentials_of_clients_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClientCredentials.of(options, "tier 'p'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curve_secret_key": "s" * 40}, "curve_secret_key and allowed_keys"),
        ({"allowed_keys": ["k" * 40]}, "curve_secret_key and allowed_keys"),
        ({"allowed_keys": "k" * 40}, "is a list"),
        ({"curve_secret_key": "s" * 40, "allowed_keys": ["k"]}, "keys of 40"),
        ({"curve_public_key": "s" * 40}, "unknown 'curve_public_key'"),
    ],
)
def test_credentials_of_servers_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerCredentials.of(options, "tier 'host'")


def test_credentials_are_not_shown() -> None:
    secret = "a very secret token"
    assert secret not in repr(ClientCredentials.of({"token": secret}, ""))
    assert secret not in repr(ServerCredentials.of({"token": secret}, ""))


@pytest.mark.parametrize("text", ["", "host", "udp://h:1", "h:1/x", "tcp://u@h:1", "h:99999", "h:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"address|[Pp]ort"):
        Address.parse(text)
