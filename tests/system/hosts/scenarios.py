"""Disturbances of the ring. Each scenario leaves at least two ready services of each kind."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from sluice.lanes.keys import ROLES, Role
from tests.system.hosts.ring import Ring, Service

Scenario = Callable[[Ring], None]

CUT_SECONDS = 10.0
AFTER_SECONDS = 6.0
"""Time after a disturbance in which its late consequences show."""
RESOLVED_SECONDS = 6.0
"""Time in which all routers notice a change of the DNS."""


def detokenizer_added(ring: Ring) -> None:
    ring.start("detok-2")
    time.sleep(RESOLVED_SECONDS + AFTER_SECONDS)


def detokenizer_drains(ring: Ring) -> None:
    """A detokenizer drains, and no replacement starts."""
    ring.services["detok-0"].drain()
    ring.unregister("detok-0")
    time.sleep(AFTER_SECONDS)


def vanishes(seat: str) -> Scenario:
    """A machine disappears without notice; a replacement of its service starts at another address."""

    def scenario(ring: Ring) -> None:
        _lose(ring.services[seat])
        ring.start(seat)
        time.sleep(AFTER_SECONDS)

    return scenario


def moves_by_drain(seat: str) -> Scenario:
    def scenario(ring: Ring) -> None:
        ring.services[seat].drain()
        ring.start(seat)
        time.sleep(AFTER_SECONDS)

    return scenario


def routers_vanish(ring: Ring) -> None:
    """The routers' machines disappear one after the other. Each router is restarted at the address that clients use."""
    for service in ring.of("router"):
        _lose(service)
        time.sleep(CUT_SECONDS)
        service.machine.plug()
        ring.start(service.seat, service.machine)
        time.sleep(AFTER_SECONDS)


def are_cut_off(role: Role) -> Scenario:
    """Each service of a kind is disconnected for a while, one after the other, while its process keeps running."""

    def scenario(ring: Ring) -> None:
        for service in ring.of(role):
            service.machine.unplug()
            time.sleep(CUT_SECONDS)
            service.machine.plug()
            time.sleep(AFTER_SECONDS)

    return scenario


def dns_is_silent(ring: Ring) -> None:
    """While the DNS does not answer, a detokenizer is killed and restarted at its address.

    Raises RuntimeError if the routers do not find it before the DNS answers again, or if they lose another peer.
    """
    lost = ring.lost
    with _silence(ring):
        time.sleep(RESOLVED_SECONDS)
        former = ring.services["detok-1"]
        former.kill()
        service = ring.launch(former.seat, former.machine)
        ring.wait_ready(service)
        ring.wait_known(service)
        time.sleep(RESOLVED_SECONDS)
    time.sleep(AFTER_SECONDS)
    if wrongly_lost := (ring.lost - lost).keys() - {former.seat}:
        raise RuntimeError(f"routers lost {', '.join(sorted(wrongly_lost))}, although nothing had happened to them")


def dns_says_nxdomain(ring: Ring) -> None:
    ring.network.dns.set_records(dict.fromkeys((*ROLES, *ring.services), ()))
    time.sleep(RESOLVED_SECONDS + AFTER_SECONDS)
    ring.publish()
    time.sleep(RESOLVED_SECONDS)


def dns_names_half(ring: Ring) -> None:
    """The DNS returns only one of two engines, and one of two detokenizers."""
    ring.network.dns.set_records({role: [ring.of(role)[0].machine.ip] for role in ROLES})
    time.sleep(RESOLVED_SECONDS + AFTER_SECONDS)
    ring.publish()
    time.sleep(RESOLVED_SECONDS)


def everything_rolls(ring: Ring) -> None:
    """A rolling update: each service drains and a replacement starts; engines and detokenizers get new addresses."""
    for role in ("detok", "engine", "router"):
        for service in ring.of(role):
            service.drain()
            ring.start(service.seat, service.machine if role == "router" else None)
            time.sleep(RESOLVED_SECONDS)


def keys_rotate(ring: Ring) -> None:
    """For each role: add a new public key, switch to the new secret key, then remove the former public key."""
    for role in ROLES:
        for change in (ring.keys.announce, ring.keys.adopt, ring.keys.retire):
            change(role)
            time.sleep(2.0)
    time.sleep(AFTER_SECONDS)


def two_machines_compute_one_engine(ring: Ring) -> None:
    """An engine with two ranks joins, and computes all streams while the other engines are replaced."""
    ranks = ring.launch_pair("engine-2")
    ring.wait_ready(ranks[0])
    ring.wait_known(ranks[0])
    for seat in ("engine-0", "engine-1"):
        ring.services[seat].drain()
        ring.unregister(seat)
    time.sleep(AFTER_SECONDS)
    for seat in ("engine-0", "engine-1"):
        ring.start(seat)
    time.sleep(RESOLVED_SECONDS)
    ring.unregister("engine-2")
    for rank in ranks:
        rank.kill()
    time.sleep(AFTER_SECONDS)


def _lose(service: Service) -> None:
    service.machine.unplug()
    service.kill()


@contextmanager
def _silence(ring: Ring) -> Iterator[None]:
    ring.network.dns.stop_answering()
    try:
        yield
    finally:
        ring.network.dns.resume_answering()


NAMES: Mapping[Role, str] = {"detok": "each detokenizer", "engine": "each engine", "router": "each router"}
MOVES: Mapping[str, Scenario] = {
    "an engine drains and moves to a new machine": moves_by_drain("engine-0"),
    "an engine's machine is lost and replaced": vanishes("engine-1"),
    "a detokenizer's machine is lost and replaced": vanishes("detok-1"),
}
ADDRESSES: Mapping[str, Scenario] = {
    "DNS does not answer while a detokenizer restarts": dns_is_silent,
    "DNS answers NXDOMAIN": dns_says_nxdomain,
}
BY_DNS: Mapping[str, Scenario] = {
    "keys are rotated": keys_rotate,
    "rolling update of all services": everything_rolls,
    "one engine runs on two machines": two_machines_compute_one_engine,
    "a detokenizer is added": detokenizer_added,
    "a detokenizer drains and is not replaced": detokenizer_drains,
    **MOVES,
    "each router's machine is lost and returns": routers_vanish,
    **{f"{name} is cut off for 10 s": are_cut_off(role) for role, name in NAMES.items()},
    **ADDRESSES,
    "DNS returns half of the peers": dns_names_half,
}
BY_TCP: Mapping[str, Scenario] = {**MOVES, **ADDRESSES}
BY_IPV6: Mapping[str, Scenario] = {**MOVES, "each router is cut off for 10 s": are_cut_off("router")}
