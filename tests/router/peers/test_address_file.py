"""Addresses from a file written by a launcher."""

import asyncio
import os

import pytest
import structlog
import zmq

from router.peers.discovery import MAX_ADDRESSES, AddressError, Addresses, parse_address
from sluice.lanes.keys import PLAIN


class Warnings(list):
    def log(self):
        def record(_, __, event):
            self.append(event)
            raise structlog.DropEvent

        return structlog.wrap_logger(None, processors=[record])


@pytest.fixture
def warnings() -> Warnings:
    return Warnings()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "engines"


@pytest.fixture
def addresses(file, warnings) -> Addresses:
    return Addresses((f"file://{file}",), log=warnings.log())


async def test_one_address_per_line_read_again_each_time(file, addresses):
    assert addresses.unresolved == {}
    file.write_text("# engines\n\ntcp://10.0.0.1:5  # the first\n  ipc:///tmp/b\ntcp://10.0.0.1:5\n")
    assert list(await addresses.look_up()) == ["tcp://10.0.0.1:5", "ipc:///tmp/b"]
    file.write_text("ipc:///tmp/b\n")
    assert await addresses.look_up() == {"ipc:///tmp/b": frozenset({"ipc:///tmp/b"})}
    file.write_text("")
    assert await addresses.look_up() == {}


async def test_names_in_the_file_are_resolved(file):
    async def resolve(host, port):
        return frozenset({f"tcp://10.0.0.9:{port}"})

    file.write_text("tcp://engine-0:7\ndns://engines:8\n")
    addresses = await Addresses((f"file://{file}", "ipc:///tmp/a"), resolve).look_up()
    assert set(addresses) == {"ipc:///tmp/a", "tcp://engine-0:7", "tcp://10.0.0.9:8"}
    assert "tcp://10.0.0.9:7" in addresses["tcp://engine-0:7"]


def make_pipe(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.unlink(), "No such file"),
        (lambda file: file.write_text("ipc:///tmp/b\nengine-2\n"), "line 2: 'engine-2' is not an address"),
        (lambda file: file.write_text("file:///other\n"), "line 1: 'file:///other' is not an address"),
        (lambda file: file.write_bytes(b"ipc:///tmp/\xff\n"), "utf-8"),
        (lambda file: file.write_text("".join(f"ipc:///{n}\n" for n in range(MAX_ADDRESSES + 1))), "4097 addresses"),
        (lambda file: file.write_text("#" * (1 << 21)), "regular file"),
        (make_pipe, "regular file"),
    ],
)
async def test_an_invalid_file_keeps_its_previous_addresses_and_is_logged_once(
    file, addresses, warnings, spoil, reason
):
    file.write_text("ipc:///tmp/a\n")
    previous = await addresses.look_up()
    spoil(file)
    for _ in range(3):
        assert await asyncio.wait_for(addresses.look_up(), 10) == previous
    (line,) = warnings
    assert line["event"] == "address_file_failed"
    assert line["kept"] == 1
    assert reason in line["error"]


async def test_a_forbidden_address_is_refused_like_an_invalid_line(file, warnings):
    file.write_text("tcp://10.0.0.1:5\n")
    addresses = Addresses((f"file://{file}",), check=PLAIN.check, log=warnings.log())
    assert await addresses.look_up() == {}
    assert "can be reached by other users or machines: create keys" in warnings[0]["error"]


@pytest.mark.parametrize("host", ["a", "a_b.c-d", "[::1]", "::1", "10.0.0.1", "-", "a b", "é", "a/b", "*", "a\x01"])
def test_zeromq_can_connect_to_accepted_hosts(host):
    address = f"tcp://{host}:7"
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        try:
            parse_address(address)
        except AddressError:
            with pytest.raises(zmq.ZMQError):
                socket.connect(address)
        else:
            socket.connect(address)


async def test_a_router_follows_the_file(ring, folder, start, monkeypatch):
    monkeypatch.setattr("router.peers.membership.RESOLVE_SECONDS", 0.05)
    for kind in ("engines", "detokenizers"):
        with open(f"{folder}/{kind}.list", "w") as file:
            file.write("")
    client = await start(
        wait=False,
        engines=(f"file://{folder}/engines.list",),
        detokenizers=(f"file://{folder}/detokenizers.list",),
    )
    ring.add_engine("engine")
    ring.add_detokenizer("detok")
    for kind, name in (("engines", "engine"), ("detokenizers", "detok")):
        with open(f"{folder}/{kind}.list", "w") as file:
            file.write(f"ipc://{folder}/{name}\n")
    await client.until_serving()
    assert [peer.name for peer in client.router.ring.membership.engines.usable] == ["engine"]
