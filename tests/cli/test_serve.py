"""``kvstore serve``: listens, says where, serves, and ends when it is asked to."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

import kvstore
from support.command import COMMAND, ENVIRONMENT, Command

pytest.importorskip("zmq", reason="no pyzmq (pip install '.[p2p]')")

FIELDS = {"model": "m"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_what_its_keys_name_until_it_is_ended(tmp_path: Path, number: signal.Signals) -> None:
    host, disk = "ram://?capacity=1MiB&pin=off", f"{tmp_path}/kv"
    with kvstore.open(host, disk, namespace=FIELDS, chunk_size="64KiB") as store:
        keys = [store.add(bytes([n]) * 1000) for n in range(3)]
    (tmp_path / "keys").write_text("".join(f"{key.hex()}\n" for key in keys[:2]))
    command = [*COMMAND, "serve", "--tier", host, "--tier", disk, "--chunk-size", "64KiB", "--at", ":0"]
    more = ["--fields", json.dumps(FIELDS), "--keys", f"{tmp_path}/keys", "--json"]
    with subprocess.Popen([*command, *more], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        report = json.loads(server.stdout.readline())
        assert report["chunks"] == 2
        url = report["address"].replace("tcp://", "peer://")
        with kvstore.open(host, url, namespace=FIELDS, chunk_size="64KiB") as store:
            assert list(store.get_many(keys)) == keys[:2]
        server.send_signal(number)
        assert server.wait(timeout=20) == 0


def test_fields_are_an_object(kv: Command) -> None:
    ran = kv("serve", "--tier", "ram://?capacity=4MiB", "--fields", "[1]", code=2)
    assert "--fields: write an object" in ran.err


def test_an_address_is_checked(kv: Command) -> None:
    ran = kv("serve", "--tier", "ram://?capacity=4MiB", "--at", "somewhere", code=2)
    assert "not an address" in ran.err
