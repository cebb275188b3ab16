"""A row's logits have the same bits alone and in any batch."""

import pytest
import torch

from engine_worker.openvino.compiled import has_bfloat16
from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.step import Draw, Slice
from sluice import tiny_model
from sluice.wire.params import SamplingParams
from tests.engine_worker.openvino.loaded import load, load_adapter

DRAW = Draw(SamplingParams(temperature=0.0), 0, 0)
LENGTHS = [1 + 37 * i % 150 for i in range(64)]
BATCHES = (2, 7, 64)
ADAPTERS = 3
"""No adapter and two others, in turns."""
NEEDS_BFLOAT16 = pytest.mark.skipif(not has_bfloat16(), reason="this CPU does not compute bfloat16 in hardware")


def logits(forward: OpenVinoForward, slices: list[Slice]) -> torch.Tensor:
    return forward.logits((), forward.prepare(forward.arrays(slices))).clone()


@pytest.fixture(scope="module")
def forwards():
    """Get a forward pass by number of threads and options. It has computed all but the last token of 64 sequences."""
    loaded = {}

    def get(threads: int, **options: object) -> OpenVinoForward:
        key = (threads, *options.items())
        if key not in loaded:
            runner = load(tiny_model.path(), threads=threads, kv_cache_tokens=64 * 160, **options)
            loaded[key] = runner._forward
            lora = options.get("lora")
            for adapter in range(1, ADAPTERS) if lora else ():
                load_adapter(runner._forward, adapter)
            for number, length in enumerate(LENGTHS):
                adapter = number % ADAPTERS if lora else 0
                logits(loaded[key], [Slice(prompt(number)[:length], 0, blocks(number), (DRAW,), adapter_slot=adapter)])
        return loaded[key]

    return get


def prompt(number: int) -> list[int]:
    return [(31 * number + 7 * i) % 4000 for i in range(LENGTHS[number] + 1)]


def blocks(number: int) -> list[int]:
    return list(range(5 * number, 5 * number + 5))


def last(number: int, *, lora: bool = False) -> Slice:
    adapter = number % ADAPTERS if lora else 0
    return Slice(prompt(number)[-1:], LENGTHS[number], blocks(number), (DRAW,), adapter_slot=adapter)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("threads", "options"),
    [
        (1, {}),
        (2, {}),
        (1, {"quantize": "int8"}),
        (2, {"quantize": "int8", "lora": True}),
        (1, {"quantize": "int4"}),
        (2, {"quantize": "int4"}),
        (1, {"kv_precision": "float16"}),
        pytest.param(1, {"dtype": "bfloat16"}, marks=NEEDS_BFLOAT16),
        pytest.param(2, {"dtype": "bfloat16"}, marks=NEEDS_BFLOAT16),
    ],
    ids=str,
)
def test_generation_in_any_batch(forwards, threads, options):
    forward, lora = forwards(threads, **options), "lora" in options
    alone = torch.cat([logits(forward, [last(number, lora=lora)]) for number in range(64)])
    for size in BATCHES:
        for first in (0, 11, 57):
            first = min(first, 64 - size)
            members = range(first, first + size)
            batched = logits(forward, [last(number, lora=lora) for number in members])
            assert torch.equal(batched, alone[first : first + size]), f"batch of {size} from {first}"


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"quantize": "int4"}], ids=str)
def test_generation_in_a_batch_with_context(forwards, options):
    forward = forwards(1, **options)
    numbers = (5, 9, 60)
    alone = torch.cat([logits(forward, [last(number)]) for number in numbers])
    contexts = [Slice(prompt(number)[:-1], 0, blocks(number), (DRAW,)) for number in (63, 44)]
    assert torch.equal(logits(forward, [*map(last, numbers), contexts[0]])[:3], alone)
    assert torch.equal(logits(forward, [*map(last, numbers), *contexts])[:3], alone)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"quantize": "int4"}], ids=str)
def test_a_context_in_any_batch(forwards, options):
    forward = forwards(1, **options)
    contexts = [Slice(prompt(number)[:-1], 0, blocks(number), (DRAW,)) for number in (3, 12, 44, 63)]
    alone = torch.cat([logits(forward, [context]) for context in contexts])
    assert torch.equal(logits(forward, [*map(last, (1, 2)), *contexts])[2:], alone)
