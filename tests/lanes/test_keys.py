"""Lanes with keys: which peers may connect, which may not, and what happens while keys change."""

import contextlib
import shutil
import socket
import time
from pathlib import Path

import pytest
import zmq
from structlog.testing import capture_logs

from sluice.lanes import lane as lanes
from sluice.lanes import listener as listeners
from sluice.lanes.inbox import Gap, Inbox
from sluice.lanes.keys import ROLES, InsecureError, Keys, Security, generate, retire
from sluice.lanes.lane import Lane
from sluice.wire.heartbeats import KeepAlive
from sluice.wire.requests import SENDER, ToDetokenizer, ToRouter
from tests.fakes.lanes import until

SECONDS = 60.0
STORED = 256
"""More frames than the pipes of a lane and an inbox store in the test's process. Others are in the kernel's buffers."""


@pytest.fixture(params=["tcp", "ipc"])
def address(request, tmp_path):
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/inbox"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(lanes, "KEYS_SECONDS", 0.02)
    monkeypatch.setattr(listeners, "KEYS_SECONDS", 0.02)


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def inbox(context, folder, address):
    inbox = Inbox(context, address, ToDetokenizer, security=Security(Keys(folder, "detok")))
    yield inbox
    inbox.close()


def lane_of(context, inbox: Inbox, folder: Path, role="engine", peer="detok") -> Lane:
    return Lane(context, inbox.address, security=Security(Keys(folder, role)).to(peer))


def deliver(lane: Lane, inbox: Inbox, number: int) -> list:
    """Send this keep-alive, and read until it arrives."""
    received, end, sent = [], time.monotonic() + SECONDS, False
    while KeepAlive("engine", number) not in received:
        assert time.monotonic() < end
        sent = sent or lane.send(KeepAlive("engine", number))
        inbox.wait(0.01)
        received += inbox.receive()
    return received


def fill(lane: Lane) -> int:
    """Send more keep-alives than the inbox stores, so that some are in transit. Returns the next number."""
    number, end = 1, time.monotonic() + SECONDS
    while lane.send(KeepAlive("engine", number)) or number <= STORED:
        assert time.monotonic() < end
        number = lane.sent
    return number


def await_refusal(inbox: Inbox, count: int = 1) -> None:
    end = time.monotonic() + SECONDS
    while inbox.refused < count:
        assert time.monotonic() < end
        assert not inbox.wait(0.01), inbox.receive()


def test_a_retired_key_is_refused_for_new_connections(context, folder, tmp_path, inbox):
    """A lane that is connected with it continues. Later connections are refused and counted."""
    shutil.copytree(folder, tmp_path / "former")
    old = lane_of(context, inbox, tmp_path / "former")
    deliver(old, inbox, 0)
    generate(folder, "engine")
    retire(folder, "engine")
    deliver(old, inbox, 1)
    before = inbox.refused
    late = lane_of(context, inbox, tmp_path / "former")
    await_refusal(inbox, before + 1)
    new = lane_of(context, inbox, folder)
    deliver(new, inbox, 2)
    assert not late.ready()
    for each in (old, late, new):
        each.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://10.0.0.1:5", "ipc://@everybody", "dns://engines:5"])
def test_a_reachable_address_needs_keys_or_insecure_ring(context, folder, address):
    with pytest.raises(InsecureError, match="--insecure-ring"):
        Security().check(address)
    Security(insecure=True).check(address)
    Security(Keys(folder, "engine")).check(address)
    if not address.startswith("dns"):
        for opened in (Lane, lambda *arguments: Inbox(*arguments, ToDetokenizer)):
            with pytest.raises(InsecureError):
                opened(context, address)


@pytest.mark.parametrize("address", ["inproc://zeromq.zap.01", "udp://127.0.0.1:5", "ipx://x", "", "tcp:/x"])
def test_other_transports_are_refused(folder, address):
    for security in (Security(), Security(insecure=True), Security(Keys(folder, "engine"))):
        with pytest.raises(InsecureError):
            security.check(address)


@pytest.mark.parametrize("role", ["engine", "router"])
def test_known_keys_are_admitted(context, folder, inbox, role):
    lane = lane_of(context, inbox, folder, role)
    assert [deliver(lane, inbox, number) for number in range(3)] == [[KeepAlive("engine", n)] for n in range(3)]
    assert inbox.refused == 0
    lane.close()


def test_messages_of_another_role_than_the_senders_key_are_dropped(context, folder, address):
    """Otherwise the holder of a detokenizer's key could report engines as restarted, which ends their streams."""
    inbox = Inbox(context, address, ToRouter, security=Security(Keys(folder, "router")), senders=SENDER)
    forger, engine = (lane_of(context, inbox, folder, role, "router") for role in ("detok", "engine"))
    end = time.monotonic() + SECONDS
    while not inbox.malformed:
        assert time.monotonic() < end
        forger.send(KeepAlive("engine", 1))
        inbox.wait(0.01)
        with capture_logs() as logs:
            assert inbox.receive() == []
    reason = "KeepAlive from a peer with the key of another role"
    assert logs[0] | {"sender": ""} == {
        "event": "frame_rejected",
        "log_level": "warning",
        "reason": reason,
        "role": "detok",
        "sender": "",
    }
    assert KeepAlive("engine", 2) in deliver(engine, inbox, 2)
    forger.close()
    engine.close()
    inbox.close()


def test_keys_of_a_role_that_never_sends_here_are_refused(context, folder, inbox):
    lane = lane_of(context, inbox, folder, "detok")
    await_refusal(inbox)
    assert not lane.ready()
    lane.close()


def test_unknown_keys_are_refused_and_counted_without_effect_on_lanes(context, tmp_path, folder, inbox):
    (tmp_path / "other").mkdir()
    for role in ROLES:
        generate(tmp_path / "other", role)
    strangers = [context.socket(zmq.PUSH) for _ in range(2)]
    known, unknown = Keys(folder, "engine"), Keys(tmp_path / "other", "engine")
    # A lane without keys, one with an unknown key, and one that expects another key of the receiver.
    for number, server in ((1, known.public("detok")[0]), (0, None)):
        if server is not None:
            strangers[number].set(zmq.CURVE_SERVERKEY, server)
            strangers[number].set(zmq.CURVE_PUBLICKEY, unknown.own.public)
            strangers[number].set(zmq.CURVE_SECRETKEY, unknown.own.secret)
        before = inbox.refused
        strangers[number].connect(inbox.address)
        with contextlib.suppress(zmq.Again):
            strangers[number].send(b"let me in", zmq.NOBLOCK)
        await_refusal(inbox, before + 1)
    before = inbox.refused
    mistaken = lane_of(context, inbox, folder, "engine", "router")
    await_refusal(inbox, before + 1)
    lane = lane_of(context, inbox, folder)
    assert deliver(lane, inbox, 0) == [KeepAlive("engine", 0)]
    assert inbox.malformed == 0
    for opened in (*strangers, mistaken, lane):
        opened.close(linger=0)


def test_bytes_that_are_not_zeromq_have_no_effect(context, folder):
    inbox = Inbox(context, "tcp://127.0.0.1:*", ToDetokenizer, security=Security(Keys(folder, "detok")))
    host, port = inbox.address.removeprefix("tcp://").split(":")
    for rubbish in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" + bytes(8) + b"\x7f" + bytes(200), bytes(1000)):
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(rubbish)
    lane = lane_of(context, inbox, folder)
    assert deliver(lane, inbox, 0) == [KeepAlive("engine", 0)]
    assert inbox.malformed == 0
    lane.close()
    inbox.close()


def test_a_new_key_of_the_sender_is_used_by_new_lanes(context, folder, inbox):
    lane = lane_of(context, inbox, folder)
    deliver(lane, inbox, 0)
    generate(folder, "engine")
    deliver(lane, inbox, 1)
    later = lane_of(context, inbox, folder)
    deliver(later, inbox, 2)
    retire(folder, "engine")
    latest = lane_of(context, inbox, folder)
    deliver(latest, inbox, 3)
    assert inbox.refused == 0
    for each in (lane, later, latest):
        each.close()


def test_a_new_key_of_the_receiver_is_used_by_both_ends(context, folder, inbox):
    lane = lane_of(context, inbox, folder)
    deliver(lane, inbox, 0)
    address = inbox.address
    generate(folder, "detok")
    time.sleep(0.05)
    end = time.monotonic() + SECONDS
    while lane.ready():
        assert time.monotonic() < end
        inbox.receive()
        time.sleep(0.001)
    assert deliver(lane, inbox, 1) == [KeepAlive("engine", 1)]
    assert inbox.address == address
    # Also without the former key.
    retire(folder, "detok")
    later = lane_of(context, inbox, folder)
    deliver(later, inbox, 2)
    lane.close()
    later.close()


def test_a_receiver_that_does_not_listen_while_its_key_changes_is_not_refused(context, folder, address):
    inbox = Inbox(context, address, ToDetokenizer, security=Security(Keys(folder, "detok")))
    lane = Lane(context, inbox.address, security=Security(Keys(folder, "engine")).to("detok"), watched=True)
    deliver(lane, inbox, 0)
    generate(folder, "detok")
    inbox.close()
    until(lambda: lane.hung_up() and lane._refused_at)
    assert lane.refused_at is None
    retire(folder, "detok")
    assert lane.refused_at is not None
    lane.close()


def test_a_lane_with_the_new_key_reaches_a_peer_with_the_former_key(context, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "there")
    inbox = Inbox(context, f"ipc://{tmp_path}/i", ToDetokenizer, security=Security(Keys(tmp_path / "there", "detok")))
    generate(folder, "detok")
    lane = lane_of(context, inbox, folder)
    deliver(lane, inbox, 0)
    lane.close()
    inbox.close()


def test_frames_in_transit_during_a_key_change_show_as_a_gap(context, folder, inbox):
    lane = lane_of(context, inbox, folder)
    deliver(lane, inbox, 0)
    sent = fill(lane)
    generate(folder, "detok")
    time.sleep(0.05)
    received, end = inbox.receive(limit=1), time.monotonic() + SECONDS
    while not any(isinstance(message, Gap) for message in received):
        assert time.monotonic() < end
        sent += lane.send(KeepAlive("engine", sent))
        inbox.wait(0.01)
        received += inbox.receive()
    sent = lane.sent
    received += deliver(lane, inbox, sent)
    missed = sum(message.missed for message in received if isinstance(message, Gap))
    numbers = [message.engine_epoch for message in received if isinstance(message, KeepAlive)]
    assert numbers == sorted(set(numbers))
    assert len(numbers) + missed == sent
    lane.close()


def test_a_context_allows_only_one_inbox_with_keys(context, folder, inbox):
    with pytest.raises(zmq.ZMQError):
        Inbox(context, "tcp://127.0.0.1:*", ToDetokenizer, security=Security(Keys(folder, "detok")))


def test_an_inbox_can_be_opened_after_another_was_closed(context, folder, tmp_path):
    for _ in range(3):
        security = Security(Keys(folder, "detok"))
        inbox = Inbox(context, f"ipc://{tmp_path}/again", ToDetokenizer, security=security)
        lane = lane_of(context, inbox, folder)
        deliver(lane, inbox, 0)
        lane.close()
        inbox.close()


def test_a_key_that_is_admitted_later_needs_no_restart(context, folder, inbox, monkeypatch):
    monkeypatch.setattr(lanes, "HANDSHAKE_SECONDS", 0.05)
    public = folder / "public" / "engine.key"
    known = public.read_bytes()
    security = Security(Keys(folder, "engine")).to("detok")
    generate(folder / "other", "engine")
    shutil.copy(folder / "other" / "public" / "engine.key", public)
    lane = Lane(context, inbox.address, security=security)
    end = time.monotonic() + SECONDS
    while inbox.refused < 3:
        assert not lane.ready()
        assert time.monotonic() < end
        time.sleep(0.01)
    public.write_bytes(known)
    deliver(lane, inbox, 0)
    lane.close()


def test_a_lane_survives_a_peer_that_breaks_the_protocol(context, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "HANDSHAKE_SECONDS", 0.1)
    plain = Inbox(context, f"ipc://{tmp_path}/inbox", ToDetokenizer)
    lane = lane_of(context, plain, folder)
    time.sleep(0.2)
    assert not lane.ready()
    assert plain.receive() == []
    plain.close()
    inbox = Inbox(context, plain.address, ToDetokenizer, security=Security(Keys(folder, "detok")))
    deliver(lane, inbox, 0)
    lane.close()
    inbox.close()
