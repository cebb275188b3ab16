import json

import numpy as np
import pytest

from bench.harness.load import Load, PlannedRequest
from bench.harness.models import TINY
from bench.systems import llama_peer
from bench.systems.llama_gguf import gguf_name, read_weights
from bench.systems.llama_peer import STEP_TOKENS, Slot, best_slot

WIDTH = 3


class Counting:
    """A fake context whose next token is the last one plus 1. Checks that each row continues its sequence."""

    def __init__(self) -> None:
        self.sequences: list[list[int]] = [[] for _ in range(WIDTH)]
        self.steps: list[int] = []

    def forget(self, sequence: int, length: int) -> None:
        assert length <= len(self.sequences[sequence])
        del self.sequences[sequence][length:]

    def step(self, rows):
        self.steps.append(len(rows))
        for token, position, sequence, _ in rows:
            assert position == len(self.sequences[sequence])
            self.sequences[sequence].append(token)
        return [token + 1 for token, _, _, needs_logits in rows if needs_logits]


def serve(context, slots, requests):
    clock = iter(range(1_000_000))
    return llama_peer._serve(context, slots, Load(requests, WIDTH), lambda: float(next(clock)))


def slots():
    return [Slot(number) for number in range(WIDTH)]


def test_each_request_gets_its_own_continuation():
    requests = [PlannedRequest([100 * i], 1 + i % 4) for i in range(10)]
    traces = serve(Counting(), slots(), requests)
    assert [trace.tokens for trace in traces] == [[100 * i + 1 + n for n in range(1 + i % 4)] for i in range(10)]
    assert all(sum(trace.counts) == len(trace.arrivals) == len(trace.tokens) for trace in traces)


def test_a_step_has_the_next_tokens_first_and_is_not_larger_than_its_limit():
    long = list(range(10_000, 10_000 + 2 * STEP_TOKENS))
    context = Counting()
    traces = serve(context, slots(), [PlannedRequest([1], 4), PlannedRequest(long, 2)])
    assert context.steps == [STEP_TOKENS, STEP_TOKENS, 1 + 2, 2]
    assert [trace.tokens for trace in traces] == [[2, 3, 4, 5], [long[-1] + 1, long[-1] + 2]]


def test_cached_tokens_of_a_slot_are_not_computed_again():
    context, cached_slots = Counting(), slots()
    serve(context, cached_slots, [PlannedRequest([1, 2, 3, 4], 2), PlannedRequest([7, 8, 9], 2)])
    context.steps.clear()
    (trace,) = serve(context, cached_slots, [PlannedRequest([7, 8, 9, 10, 11, 50], 1)])
    assert (trace.cached_tokens, trace.tokens, context.steps) == (4, [51], [2])
    (trace,) = serve(context, cached_slots, [PlannedRequest([1, 2, 3, 4], 1)])
    assert (trace.cached_tokens, trace.tokens) == (3, [5])


def test_the_slot_with_the_longest_common_prefix_is_used():
    free = [Slot(0, [1]), Slot(1, [1, 2, 3]), Slot(2, [2, 3])]
    assert best_slot(free, [1, 2, 9]).number == 1


def test_every_weight_of_the_bundled_model_has_a_name_and_its_values():
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    expected = load_file(TINY / "model.safetensors")
    weights = dict(read_weights(TINY / "model.safetensors"))
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[name], expected[name].to(torch.float32).numpy()) for name in weights)
    names = {gguf_name(name) for name in weights}
    assert len(names) == len(weights) == 2 + 11 * json.loads((TINY / "config.json").read_text())["num_hidden_layers"]
    assert {"token_embd.weight", "output_norm.weight", "blk.0.attn_q_norm.weight", "blk.5.ffn_down.weight"} <= names
