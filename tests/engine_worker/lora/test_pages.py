"""Which adapters a step tells the device to drop."""

from engine_worker.lora.pages import AdapterPages
from tests.fakes.adapters import ScriptedAdapters


def pages():
    return AdapterPages(ScriptedAdapters(2, {"a": 2, "b": 2}))


def test_an_adapter_whose_load_no_step_has_taken_is_not_on_the_device():
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


def test_one_whose_step_failed_may_be_on_the_device():
    found = pages()
    first = found.hold("a")
    loads = found.take_loads()
    # The step behind that one still uses it.
    found.requeue(loads)
    found.release("a")
    found.hold("b")
    (load,) = found.take_loads()
    assert load.dropped == (first,)
    assert (load.version, load.pages) == ("b", (0, 1))
