"""Streams with adapters in a pool that is too small for all: paused streams get the same tokens as alone."""

from itertools import count

import pytest

from sluice.settings.engine import SchedulerNames
from tests.engine_worker.lora.engines import finish, load_first, lora_engine, submit
from tests.engine_worker.lora.oracle import ATTENTION, adapter_of, write_adapter
from tests.engine_worker.lora.test_peft import prompt
from tests.fakes.engine import EngineBench

TOKENS = 40
PAGE_RANKS = 8
OPTIONS = ({"rank": 8}, {"rank": 4, "targets": ATTENTION}, {"rank": 20, "targets": ("v_proj", "down_proj")})
PAGES = (14, 8, 12)
"""Pages that each adapter takes."""


@pytest.fixture(scope="module")
def prompts(model) -> list[tuple[list[int], object]]:
    """Prompts with their adapters: three per adapter, then three without."""
    folders = [write_adapter(model.parent / f"paused{i}", model, i, **each) for i, each in enumerate(OPTIONS)]
    return [(prompt(i, 9 + 5 * (i % 3)), [*folders, None][i // 3]) for i in range(12)]


@pytest.fixture(scope="module")
def undisturbed(model, prompts) -> list[list[int]]:
    bench, outputs = lora_engine(model), []
    for index in range(len(prompts)):
        number = send(bench, prompts, index)
        finish(bench)
        outputs.append(bench.output(number))
    assert bench.cache.preemptions == 0
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)
    return outputs


def crowded(model, prompts, tokens: int, pages: int, overlap: bool) -> EngineBench:
    """All adapters are in host memory."""
    bench = lora_engine(
        model,
        overlap=overlap,
        kv_cache_tokens=tokens,
        tokens_per_block=4,
        lora_num_device_module_layer=PAGE_RANKS * pages,
        batching={"max_tokens_per_step": 24, "schedulers": SchedulerNames("max_utilization")},
    )
    load_first(bench, {folder for _, folder in prompts if folder})
    return bench


def send(bench: EngineBench, prompts, index: int, priority: int = 2) -> int:
    tokens, folder = prompts[index]
    return submit(bench, tokens, folder and adapter_of(folder), TOKENS, temperature=0.8, seed=index, priority=priority)


def paused(bench: EngineBench) -> set[int]:
    """Requests that were paused at least once."""
    return {each.request for report in bench.reports for each in report.requests if each.pauses}


@pytest.mark.quick(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [sum(PAGES), max(PAGES)], ids=["room for all adapters", "one adapter at a time"])
def test_pauses_change_no_token(model, prompts, undisturbed, overlap, pages):
    bench = crowded(model, prompts, 112, pages, overlap)
    numbers = [send(bench, prompts, index) for index in range(len(prompts))]
    finish(bench)
    with_adapters = {number for number, (_, folder) in zip(numbers, prompts, strict=True) if folder}
    assert len(paused(bench) & with_adapters) > 1
    assert (bench.cache.adapters.evictions > 0) == (pages == max(PAGES))
    assert [bench.output(number) for number in numbers] == undisturbed


@pytest.mark.parametrize("overlap", [False, True])
def test_an_adapter_is_evicted_while_its_stream_is_paused(model, prompts, undisturbed, overlap):
    # Any two of the adapters fit, but not three.
    bench = crowded(model, prompts, 72, sum(PAGES) - 1, overlap)
    launched, launch = [], bench.runner.launch
    bench.runner.launch = lambda step: launched.append(step) or launch(step)
    first, second, urgent = 3, 0, 6
    numbers = {index: send(bench, prompts, index) for index in (first, second)}
    for steps in count():
        assert steps < 200
        bench.step()
        if bench.cache.preemptions:
            break
    numbers[urgent] = send(bench, prompts, urgent, priority=4)
    finish(bench)
    assert numbers[second] in paused(bench)
    version = adapter_of(prompts[second][1]).version
    assert [load.version for step in launched for load in step.loads].count(version) == 2
    for index, number in numbers.items():
        assert bench.output(number) == undisturbed[index]
