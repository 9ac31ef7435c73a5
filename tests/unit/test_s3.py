"""The S3 backend beyond what every backend must do: its requests, how it takes refusals, and what it says
when it cannot open."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.backends.base import BackendContext
from kvstore.config import parse
from kvstore.engine.base import Batch, Completion, Status, Verb
from kvstore.engine.worker import Worker
from kvstore.errors import BackendError, ClosedError, ConfigError, NamespaceMismatchError
from kvstore.testing.backend import make_key
from support.object_store import Bucket, free_ports
from support.tcp_proxy import Proxy

pytest.importorskip("s3fs", reason="no s3fs (pip install '.[s3]')")

from kvstore.backends.s3 import S3Backend, namespaces

SIZE = 64 * 1024
SPACE = "0f" * 16
CONTEXT = BackendContext(b"f" * 16, b"{}", SIZE)
KEYS = [make_key(number) for number in range(40)]
REFUSED = b"HTTP/1.1 %s\r\nContent-Type: application/xml\r\nContent-Length: %d\r\n\r\n%s"


def make_backend(bucket: Bucket, **options: Any) -> S3Backend:
    storage = {**bucket.options, **options.pop("storage_options", {})}
    return S3Backend(CONTEXT, bucket.url, SPACE, storage, **options)


def payload(fill: int = 7) -> memoryview:
    return memoryview(bytearray([fill]) * SIZE)


def refusal(status: bytes, code: bytes) -> bytes:
    body = b"<Error><Code>%s</Code><Message>no</Message></Error>" % code
    return REFUSED % (status, len(body), body)


@pytest.fixture
def proxy(moto_bucket: Bucket) -> Iterator[Proxy]:
    with Proxy(moto_bucket.address) as proxy:
        yield proxy


@pytest.fixture
def backend(moto_bucket: Bucket, proxy: Proxy) -> Iterator[S3Backend]:
    """On a server that the proxy stands before; it has counted nothing yet."""
    with closing(make_backend(moto_bucket.at(proxy.endpoint))) as backend:
        backend.open()
        proxy.forget()
        yield backend


# Requests.


def test_a_probe_is_one_head_for_each_key(backend: S3Backend, proxy: Proxy) -> None:
    backend.write(KEYS[3], payload())
    proxy.forget()
    assert backend.exists(KEYS) == [key == KEYS[3] for key in KEYS]
    assert {method for method, _ in proxy.requests} == {"HEAD"}
    assert sorted(proxy.requests.values()) == [1] * len(KEYS)


def test_a_read_is_one_get(backend: S3Backend, proxy: Proxy) -> None:
    backend.write(KEYS[0], payload())
    proxy.forget()
    out = payload(0)
    assert backend.read_into(KEYS[0], out) == SIZE
    assert backend.read_into(KEYS[1], out) is None
    assert sum(proxy.requests.values()) == proxy.count("GET", ".kv") == 2


def test_a_write_is_one_put(backend: S3Backend, proxy: Proxy) -> None:
    assert backend.write(KEYS[0], payload(1)) is True
    assert backend.write(KEYS[0], payload(2)) is False
    assert sum(proxy.requests.values()) == proxy.count("PUT", ".kv") == 2


def test_deletes_go_in_batches(backend: S3Backend, proxy: Proxy) -> None:
    backend.write(KEYS[0], payload())
    proxy.forget()
    backend.delete([KEYS[0], *map(make_key, range(1000, 3500))])
    assert sum(proxy.requests.values()) == proxy.count("POST") == 3
    assert backend.exists(KEYS[:1]) == [False]


def test_connections_are_used_again(bucket: Bucket) -> None:
    out = payload(0)
    with Proxy(bucket.address) as proxy, closing(make_backend(bucket.at(proxy.endpoint))) as backend:
        backend.open()
        for key in KEYS[:5]:
            assert backend.write(key, payload()) is True
            assert backend.read_into(key, out) == SIZE
        assert proxy.connections == 1


def test_no_more_connections_than_concurrency(bucket: Bucket) -> None:
    with Proxy(bucket.address) as proxy:
        with closing(make_backend(bucket.at(proxy.endpoint), concurrency=3)) as backend:
            backend.open()
            backend.exists(KEYS)
        assert proxy.connections == 3


def test_listings_come_in_pages(backend: S3Backend, proxy: Proxy) -> None:
    proxy.rewrite = lambda data: data.replace(b"list-type=2", b"list-type=2&max-keys=7")
    for key in KEYS:
        backend.write(key, payload()[:10])
    entries = list(backend.entries())
    assert all(abs(entry.mtime - time.time()) < 60 for entry in entries)
    names = [entry.name for entry in entries]
    assert proxy.count("GET") == 6
    assert len(names) == len(KEYS) + 1
    assert names == sorted(names)
    assert [entry.name for entry in backend.entries(names[19])] == names[20:]
    assert {row.key for row in backend.scan()} == set(KEYS)


def test_lists_namespaces(moto_bucket: Bucket, backend: S3Backend) -> None:
    moto_bucket.client().put_object(Bucket=moto_bucket.name, Key="kv/other/file", Body=b"")
    moto_bucket.client().put_object(Bucket=moto_bucket.name, Key=f"kv/{'1e' * 16}/file", Body=b"")
    assert list(namespaces(moto_bucket.url, moto_bucket.options)) == [(SPACE, b"{}"), ("1e" * 16, None)]


def test_bodies_may_be_signed(bucket: Bucket) -> None:
    """Against the server that looks: the client reads a body, and starts it again."""
    signed = {"config_kwargs": {"s3": {"payload_signing_enabled": True}}}
    with closing(make_backend(bucket, storage_options=signed)) as backend:
        backend.open()
        assert backend.write(KEYS[0], payload(5)) is True
        out = payload(0)
        assert backend.read_into(KEYS[0], out) == SIZE
        assert out == payload(5)


def test_files_are_removed_once(backend: S3Backend) -> None:
    backend.create_file("left/over", b"x")
    assert backend.remove_file("left/over") is True
    assert backend.remove_file("left/over") is False


# Who wins a race.


def test_notices_that_conditions_are_ignored(moto_bucket: Bucket, proxy: Proxy) -> None:
    proxy.rewrite = lambda data: data.replace(b"If-None-Match", b"X-Not-Examined")
    check_looks_before_it_writes(moto_bucket.at(proxy.endpoint))


def test_notices_that_conditions_are_refused(moto_bucket: Bucket, proxy: Proxy) -> None:
    answer = refusal(b"501 Not Implemented", b"NotImplemented")
    proxy.reply = lambda data: answer if b"if-none-match" in data.lower() else None
    check_looks_before_it_writes(moto_bucket.at(proxy.endpoint))


def check_looks_before_it_writes(bucket: Bucket) -> None:
    with closing(make_backend(bucket)) as backend:
        backend.open()
        assert not backend.capabilities.first_writer_wins
        assert backend.write(KEYS[0], payload(1)) is True
        assert backend.write(KEYS[0], payload(2)) is False
        out = payload(0)
        assert backend.read_into(KEYS[0], out) == SIZE
        assert out == payload(1)


@pytest.mark.parametrize("code", [b"PreconditionFailed", b"SomethingElse"])
def test_a_refused_condition_means_that_it_is_there(backend: S3Backend, proxy: Proxy, code: bytes) -> None:
    """Servers name the condition, or do not; s3fs makes different errors of it."""
    proxy.reply = lambda data: refusal(b"412 Precondition Failed", code)
    assert backend.write(KEYS[0], payload()) is False


def test_a_conflict_is_decided_by_another_try(backend: S3Backend, proxy: Proxy) -> None:
    answers = [refusal(b"409 Conflict", b"ConditionalRequestConflict")] * 3
    proxy.reply = lambda data: answers.pop() if answers else None
    assert backend.write(KEYS[0], payload()) is True
    assert proxy.count("PUT") == 4


def test_knows_its_own_object_when_the_answer_was_lost(bucket: Bucket) -> None:
    with Proxy(bucket.address) as proxy, closing(make_backend(bucket.at(proxy.endpoint))) as backend:
        backend.open()
        proxy.forget()
        proxy.answer_limit, proxy.most_cuts = len(b"HTTP/1.1 100 Continue\r\n\r\n"), 1
        assert backend.write(KEYS[0], payload(1)) is True
        assert (proxy.cuts, proxy.count("PUT")) == (1, 2)
        assert backend.write(KEYS[0], payload(1)) is False


# Refusals, and time.


def run_read(backend: S3Backend, retries: int) -> Any:
    worker = Worker(backend, lambda slot: payload(0), retries=retries)
    worker.open()
    done: list[Completion] = []
    worker.run(Batch(1, 0, Verb.READ, [KEYS[0]], [0], [0]), done.append)
    return done[-1].results[0]


def test_retries_are_those_of_the_client_alone(moto_bucket: Bucket, proxy: Proxy) -> None:
    answer = refusal(b"503 Slow Down", b"SlowDown")
    proxy.reply = lambda data: answer if b".kv HTTP" in data else None
    with closing(make_backend(moto_bucket.at(proxy.endpoint), retries=1)) as backend:
        result = run_read(backend, retries=1)
    assert result.status is Status.FAILED
    assert "SlowDown, 503" in result.error
    assert proxy.count("GET", ".kv") == 2


def test_a_hang_ends_at_the_deadline(moto_bucket: Bucket, proxy: Proxy) -> None:
    with closing(make_backend(moto_bucket.at(proxy.endpoint), timeout=3.0)) as backend:
        backend.open()
        proxy.hanging.set()
        started = time.monotonic()
        with pytest.raises(BackendError, match="timed out") as failure:
            backend.exists(KEYS)
        assert failure.value.retryable
        assert time.monotonic() - started < 3.0


def test_closing_ends_what_hangs(moto_bucket: Bucket, proxy: Proxy) -> None:
    backend = make_backend(moto_bucket.at(proxy.endpoint), timeout=60.0)
    backend.open()
    proxy.hanging.set()
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(backend.exists, KEYS)
        proxy.await_request("HEAD")
        backend.close()
        assert isinstance(under_way.exception(5.0), ClosedError)
    with pytest.raises(ClosedError):
        backend.exists(KEYS)


# Opening.


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing that could tell credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def unused_port() -> int:
    [port] = free_ports(1)
    return port


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[Bucket], Bucket], dict[str, Any]]] = {
    "wrong secret": (ConfigError, "refuses the credentials", lambda b: b, {"secret": "Wrong-9-secret"}),
    "wrong key": (ConfigError, "refuses the credentials", lambda b: b, {"key": "nobody"}),
    "anonymous": (ConfigError, "access is denied", lambda b: b, {"anon": True}),
    "no credentials": (ConfigError, "no credentials", lambda b: b, {"key": None, "secret": None}),
    "half of them": (ConfigError, "no credentials", lambda b: b, {"secret": None}),
    "no such profile": (ConfigError, "ProfileNotFound", lambda b: b, {"profile": "nobody"}),
    "no such bucket": (ConfigError, "no such bucket", lambda b: Bucket("absent-bucket", b.endpoint), {}),
    "nobody listens": (BackendError, "connect", lambda b: b.at(f"http://127.0.0.1:{unused_port()}"), {}),
    "no such host": (BackendError, "name is not known", lambda b: b.at("http://no-such-host.invalid"), {}),
    "no URL": (ConfigError, "ValueError", lambda b: b.at("127.0.0.1"), {}),
    "no such option": (ConfigError, "secrett", lambda b: b, {"secrett": "Wrong-9-secret"}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.usefixtures("bare_environment")
def test_says_what_is_wrong_at_open(mistake: str, bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    kind, text, change, options = MISTAKES[mistake]
    tier = change(bucket)
    caplog.set_level(logging.DEBUG)
    started = time.monotonic()
    with pytest.raises(kind, match=text) as failure:
        kvstore.open(
            "ram://?capacity=1MiB&pin=off",
            {"url": tier.url, "storage_options": {**tier.options, **options}},
            chunk_size=SIZE,
        )
    assert time.monotonic() - started < 5.0
    assert "\n" not in str(failure.value)
    assert tier.name in str(failure.value)
    said = "".join(traceback.format_exception(failure.value)) + repr(failure.value) + caplog.text
    assert bucket.secret not in said
    assert "Wrong-9-secret" not in said


def test_says_when_the_server_is_none_of_s3(moto_bucket: Bucket, proxy: Proxy) -> None:
    proxy.reply = lambda data: REFUSED % (b"200 OK", 5, b"hello")
    backend = make_backend(moto_bucket.at(proxy.endpoint))
    with closing(backend), pytest.raises(NamespaceMismatchError):
        backend.open()


def test_a_hang_at_open_takes_less_than_five_seconds(moto_bucket: Bucket, proxy: Proxy) -> None:
    proxy.hanging.set()
    started = time.monotonic()
    backend = make_backend(moto_bucket.at(proxy.endpoint))
    with closing(backend), pytest.raises(BackendError, match="timed out"):
        backend.open()
    assert time.monotonic() - started < 5.0


def test_goes_on_without_a_tier_that_is_not_required(moto_bucket: Bucket) -> None:
    tier = moto_bucket.at(f"http://127.0.0.1:{unused_port()}")
    with kvstore.open(
        "ram://?capacity=1MiB&pin=off",
        {"url": f"{tier.url}?required=false&timeout=2s", "storage_options": tier.options},
        chunk_size=SIZE,
    ) as store:
        store.put(KEYS[0], b"kept in memory")
        assert store.get(KEYS[0]) == b"kept in memory"
        assert store.get(KEYS[1]) is None


@pytest.mark.usefixtures("bare_environment")
@pytest.mark.parametrize("source", ["environment", "profile"])
def test_credentials_from_elsewhere(
    source: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"endpoint_url": bucket.endpoint}
    if source == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket.key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket.secret)
    else:
        text = f"[fleet]\naws_access_key_id = {bucket.key}\naws_secret_access_key = {bucket.secret}\n"
        (tmp_path / "credentials").write_text(text)
        options["profile"] = "fleet"
    with closing(S3Backend(CONTEXT, bucket.url, SPACE, options)) as backend:
        backend.open()
        assert backend.write(KEYS[0], payload()) is True


def test_nothing_shows_the_secret(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    config = parse(
        "ram://?capacity=1MiB&pin=off",
        {"url": bucket.url, "storage_options": bucket.options},
        chunk_size=SIZE,
    )
    with closing(make_backend(bucket)) as backend:
        backend.open()
        backend.write(KEYS[0], payload())
        assert bucket.secret not in repr(backend) + repr(vars(backend)) + repr(config)
    assert caplog.text
    assert bucket.secret not in caplog.text
