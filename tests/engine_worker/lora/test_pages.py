"""Which adapters a step drops from the device."""

from engine_worker.lora.pages import AdapterPages
from tests.fakes.adapters import ScriptedAdapters


def pages():
    return AdapterPages(ScriptedAdapters(2, {"a": 2, "b": 2}))


def test_an_adapter_whose_load_was_not_part_of_a_step_is_not_dropped():
    found = pages()
    found.hold("a")
    found.release("a")
    found.hold("b")
    (load,) = found.take_loads()
    assert load.dropped == ()


def test_an_evicted_adapter_is_dropped_with_the_next_load():
    found = pages()
    first = found.hold("a")
    found.take_loads()
    found.release("a")
    found.hold("b")
    (load,) = found.take_loads()
    assert load.dropped == (first,)


def test_an_adapter_whose_step_failed_may_be_on_the_device():
    found = pages()
    first = found.hold("a")
    loads = found.take_loads()
    # The next step still uses it.
    found.requeue(loads)
    found.release("a")
    found.hold("b")
    (load,) = found.take_loads()
    assert load.dropped == (first,)
    assert (load.version, load.pages) == ("b", (0, 1))
