"""Host names that lanes connect to. Sluice looks them up, so that no ZeroMQ connection waits for the DNS."""

import threading
import time

import pytest
import zmq

from sluice.host.host_names import (
    AGAIN_SECONDS,
    FRESH_SECONDS,
    MAX_HOSTS,
    PATIENCE_SECONDS,
    Endpoint,
    HostNames,
    resolve,
)
from sluice.lanes.inbox import Inbox
from sluice.lanes.keys import Keys, Security, generate
from sluice.lanes.lane import Lane
from sluice.wire.heartbeats import KeepAlive
from sluice.wire.requests import ToDetokenizer
from tests.fakes.clock import Clock
from tests.fakes.lanes import connected, until
from tests.fakes.ports import free_ports

INSECURE = Security(insecure=True)
FIRST, SECOND = "127.0.0.1", "127.0.0.2"


class Dns:
    """Answers from `known`. While it is silent, lookups block."""

    def __init__(self, **known):
        self.known = known
        self.lookups = 0
        self._answers = threading.Event()
        self._answers.set()

    def __call__(self, host):
        self.lookups += 1
        assert self._answers.wait(60)
        if host not in self.known:
            raise OSError("unknown name")
        return self.known[host]

    def fall_silent(self):
        self._answers.clear()

    def answer(self):
        self._answers.set()


@pytest.fixture
def dns():
    dns = Dns(peer=(FIRST,))
    yield dns
    dns.answer()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def names(dns, clock):
    return HostNames(dns, clock)


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


def test_a_name_is_known_after_its_first_lookup(names, dns):
    dns.fall_silent()
    assert names.ips("peer") == ()
    assert names.ips("peer") == ()
    dns.answer()
    until(lambda: names.ips("peer") == (FIRST,))
    assert dns.lookups == 1


def test_lookups_of_a_name_do_not_overlap_or_follow_too_soon(names, dns, clock):
    until(lambda: names.ips("peer"))
    assert dns.lookups == 1
    dns.fall_silent()
    for _ in range(3):
        clock.now += AGAIN_SECONDS
        assert names.ips("peer") == (FIRST,)
    until(lambda: dns.lookups == 2)
    dns.known["peer"] = (SECOND,)
    dns.answer()
    until(lambda: names.ips("peer") == (SECOND,))


def test_a_name_whose_lookup_fails_keeps_its_address(names, dns, clock):
    until(lambda: names.ips("peer"))
    del dns.known["peer"]
    clock.now += AGAIN_SECONDS
    names.ips("peer")
    until(lambda: dns.lookups == 2)
    assert names.ips("peer") == (FIRST,)


def test_an_old_address_is_used_only_while_the_dns_does_not_answer(names, dns, clock):
    until(lambda: names.ips("peer"))
    clock.now += FRESH_SECONDS
    dns.fall_silent()
    assert names.ips("peer") == ()
    clock.now += PATIENCE_SECONDS
    assert names.ips("peer") == (FIRST,)


def test_a_pending_lookup_does_not_delay_other_names(clock):
    silent = threading.Event()
    names = HostNames(lambda host: (FIRST,) if host == "peer" or silent.wait(60) else (), clock)
    assert names.ips("silent") == ()
    until(lambda: names.ips("peer") == (FIRST,))
    silent.set()


def test_the_number_of_names_is_bounded(names, dns):
    dns.known = {f"peer{i}": (FIRST,) for i in range(MAX_HOSTS + 1)}
    for i in range(MAX_HOSTS + 1):
        until(lambda name=f"peer{i}": names.ips(name))
    assert len(names._hosts) == MAX_HOSTS


def test_the_systems_resolver_puts_ipv4_first():
    assert resolve("localhost")[0] == FIRST
    with pytest.raises((OSError, UnicodeError)):
        resolve("a..b")


@pytest.mark.parametrize("address", ["ipc:///tmp/a", "tcp://127.0.0.1:5", "tcp://[::1]:5", "mem://1", "tcp://*:5"])
def test_only_names_are_looked_up(names, dns, address):
    endpoint = Endpoint(address, names)
    assert (endpoint.text, endpoint.named, endpoint.follow(try_next=True)) == (address, False, False)
    assert dns.lookups == 0


def test_an_endpoint_follows_its_name(names, dns, clock):
    endpoint = Endpoint("tcp://peer:7", names)
    until(lambda: endpoint.text or endpoint.follow())
    assert endpoint.text == f"tcp://{FIRST}:7"
    assert not endpoint.follow(try_next=True)
    dns.known["peer"] = (SECOND, "fd00::1")
    clock.now += AGAIN_SECONDS
    until(endpoint.follow)
    assert endpoint.text == f"tcp://{SECOND}:7"
    assert not endpoint.follow()
    assert endpoint.follow(try_next=True)
    assert endpoint.text == "tcp://[fd00::1]:7"
    assert endpoint.follow(try_next=True)
    assert endpoint.text == f"tcp://{SECOND}:7"


def arrives(lane: Lane, inbox: Inbox) -> bool:
    """Whether a message that the lane accepted since the last call has arrived."""
    lane.send(KeepAlive("engine", 1))
    return inbox.wait(0.01) and bool(inbox.receive())


def inbox_at(context, address: str, security: Security = INSECURE) -> Inbox:
    return Inbox(context, address, ToDetokenizer, security=security)


def lane_to(context, inbox: Inbox, dns, security: Security = INSECURE) -> Lane:
    port = inbox.address.rpartition(":")[2]
    return Lane(context, f"tcp://peer:{port}", security=security, watched=True, names=HostNames(dns))


def test_a_lane_to_an_unknown_name_waits_for_it(context, dns):
    inbox = inbox_at(context, f"tcp://{FIRST}:*")
    dns.known = {}
    lane = lane_to(context, inbox, dns)
    assert lane.open
    assert not lane.send(KeepAlive("engine", 1))
    dns.known = {"peer": (FIRST,)}
    connected(lane)
    until(lambda: arrives(lane, inbox))
    assert inbox.gaps == 0
    lane.close()
    inbox.close()


@pytest.mark.parametrize("with_keys", [False, True])
def test_a_lane_moves_with_its_name(dns, tmp_path, with_keys):
    def security(role, peer=None):
        if not with_keys:
            return INSECURE
        with_own_key = Security(Keys(tmp_path, role))
        return with_own_key.to(peer) if peer else with_own_key

    for role in ("router", "engine", "detok"):
        generate(tmp_path, role)
    # Each of two inboxes with keys needs its own context.
    with zmq.Context() as here, zmq.Context() as elsewhere, zmq.Context() as sender:
        port = free_ports(1)
        former = inbox_at(here, f"tcp://{FIRST}:{port}", security("detok"))
        lane = connected(lane_to(sender, former, dns, security("engine", "detok")))
        epoch = lane.epoch
        former.close()
        later = inbox_at(elsewhere, f"tcp://{SECOND}:{port}", security("detok"))
        dns.known["peer"] = (SECOND,)
        until(lambda: arrives(lane, later))
        assert lane.epoch == epoch
        assert not lane.hung_up()
        lane.close()
        later.close()


def test_while_the_dns_does_not_answer_lanes_reconnect_to_their_last_address(context, dns):
    port = free_ports(1)
    inbox, neighbour = inbox_at(context, f"tcp://{FIRST}:{port}"), inbox_at(context, f"tcp://{FIRST}:*")
    names = HostNames(dns)
    lane = connected(Lane(context, f"tcp://peer:{port}", security=INSECURE, names=names))
    neighbour_lane = connected(Lane(context, neighbour.address, security=INSECURE))
    dns.fall_silent()
    inbox.close()
    until(lambda: not lane.send(KeepAlive("engine", 1)))
    lookups, end = dns.lookups, time.monotonic() + 60
    while dns.lookups == lookups:
        assert time.monotonic() < end
        lane.send(KeepAlive("engine", 1))
        until(lambda: arrives(neighbour_lane, neighbour))
    # The DNS does not answer until the end of the test.
    until(lambda: arrives(neighbour_lane, neighbour))
    later = inbox_at(context, f"tcp://{FIRST}:{port}")
    until(lambda: arrives(lane, later))
    # A successor of the lane uses the known address without the DNS.
    successor = connected(Lane(context, lane.address, security=INSECURE, names=names))
    for each in (lane, neighbour_lane, successor, later, neighbour):
        each.close()
