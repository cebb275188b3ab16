"""Who gets beats. What they say is tested with the worker."""

from engine_worker.beats import SILENCE_SECONDS, Listeners
from sluice.ring.wire import Hello
from tests.fakes.engine import Clock


def test_a_router_gets_beats_until_its_hellos_stop():
    clock = Clock()
    listeners = Listeners(clock)
    listeners.hear(Hello("r0", "mem://r0"))
    clock.now += SILENCE_SECONDS - 1
    listeners.hear(Hello("r1", "mem://r1"))
    assert listeners.recent().keys() == {"mem://r0", "mem://r1"}
    clock.now += 2
    assert listeners.recent().keys() == {"mem://r1"}
    listeners.hear(Hello("r1", "mem://r1", cache_heard=7))
    assert {address: greeting.cache_heard for address, greeting in listeners.heard.items()} == {"mem://r1": 7}


def test_what_another_thread_reads_never_changes_under_it():
    listeners = Listeners(Clock())
    listeners.hear(Hello("r0", "mem://r0"))
    seen = listeners.heard
    listeners.hear(Hello("r1", "mem://r1"))
    assert seen.keys() == {"mem://r0"}
