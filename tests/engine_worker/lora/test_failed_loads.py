"""A load that raises on the device ends the requests with this adapter; all others get peft's tokens."""

import pytest

from engine_worker.lora.paged import PagedAdapters
from tests.engine_worker.lora.engines import OPENVINO, finish, lora_engine, submit
from tests.engine_worker.lora.oracle import adapter_of, write_adapter
from tests.engine_worker.lora.test_peft import prompt


@pytest.fixture(scope="module")
def folders(model):
    return [write_adapter(model.parent / f"failing{seed}", model, seed, rank=4) for seed in range(2)]


@pytest.fixture
def failing(monkeypatch):
    """Numbers of adapters whose loads fail, once each."""
    numbers, place = set(), PagedAdapters.place

    def placed(self, number, modules, pages):
        if number in numbers:
            numbers.remove(number)
            next(iter(modules))
            raise MemoryError("no room")
        place(self, number, modules, pages)

    monkeypatch.setattr(PagedAdapters, "place", placed)
    return numbers


@pytest.mark.parametrize(
    ("overlap", "backend"),
    [(False, "torch"), (True, "torch"), pytest.param(True, *OPENVINO.values, marks=OPENVINO.marks)],
)
def test_other_requests_get_their_tokens(model, oracle, folders, failing, overlap, backend):
    bench = lora_engine(model, overlap=overlap, backend=backend)
    failing.add(1)
    lost = submit(bench, prompt(1, 40), adapter_of(folders[0]), n=2, logprobs=0)
    neighbours = {
        submit(bench, prompt(seed), adapter and adapter_of(adapter)): (prompt(seed), adapter)
        for seed, adapter in ((2, None), (3, folders[1]))
    }
    for _ in range(200):
        bench.step()
        if not failing:
            break
    neighbours[submit(bench, prompt(4), None)] = prompt(4), None
    finish(bench)
    assert [bench.fault(lost), bench.fault(lost, 1)] == ["STEP_FAILED"] * 2
    repeated = submit(bench, prompt(1, 70), adapter_of(folders[0]))
    neighbours[repeated] = prompt(1, 70), folders[0]
    finish(bench)
    for number, (tokens, folder) in neighbours.items():
        assert bench.output(number) == oracle.greedy(folder, tokens, 8)[0]
