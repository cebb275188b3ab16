"""Which adapters a step drops from the device."""

from engine_worker.lora.pages import AdapterPages
from tests.fakes.adapters import ScriptedAdapters


def pages():
    return AdapterPages(ScriptedAdapters(2, {"a": 2, "b": 2}))


def test_an_adapter_whose_load_was_not_part_of_a_step_is_not_dropped():
    adapters = pages()
    adapters.hold("a")
    adapters.release("a")
    adapters.hold("b")
    (load,) = adapters.take_loads()
    assert load.dropped == ()


def test_an_evicted_adapter_is_dropped_with_the_next_load():
    adapters = pages()
    first = adapters.hold("a")
    adapters.take_loads()
    adapters.release("a")
    adapters.hold("b")
    (load,) = adapters.take_loads()
    assert load.dropped == (first,)


def test_an_adapter_whose_step_failed_may_be_on_the_device():
    adapters = pages()
    first = adapters.hold("a")
    loads = adapters.take_loads()
    # The next step still uses it.
    adapters.requeue(loads)
    adapters.release("a")
    adapters.hold("b")
    (load,) = adapters.take_loads()
    assert load.dropped == (first,)
    assert (load.version, load.pages) == ("b", (0, 1))
