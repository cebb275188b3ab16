"""Each check finds the difference that it is for."""

import random
import threading
from math import inf
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu import checks, measures
from bench.gpu.checks import (
    check_choices,
    check_graphs,
    check_overlap,
    check_parity,
    difference,
    together,
    twin,
    verdict,
)
from bench.gpu.engine import Served, served
from bench.gpu.measures import SHORTEST_GAP, uncovered
from bench.gpu.scale import tiny_scale
from bench.gpu.shapes import LARGE, SMALL, SPARSE, tiny, tiny_sparse
from engine_worker.attention.cache import KVCache
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.shard import Place
from engine_worker.models.qwen3 import Qwen3Moe
from engine_worker.sampling.choose import Filtered
from engine_worker.step import Draw, Drawn
from sluice.wire.rows import TokenLogprob
from tests.engine_worker.parallel import two_ranks

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CHOICES = {
    "device": "cuda:0",
    "attention": "triton",
    "attention_reason": "it runs",
    "fused": "layers and sampling",
    "cuda_graphs": "11 up to 128",
}


def chose(**choices: str) -> Served:
    return Served(tiny(), None, None, SimpleNamespace(choices=CHOICES | choices), torch.float32, 0)


GRAPHS = {"cuda_graphs": "none: the model waits for the device"}


@pytest.mark.parametrize(
    ("others", "detail"),
    [
        ({"attention": "reference", "attention_reason": "nothing faster runs"}, "reference: nothing faster runs"),
        ({"fused": "no: in a test, the norm is off by 0.21"}, "fused = no: in a test, the norm is off by 0.21"),
        (GRAPHS, "cuda_graphs = none: the model waits for the device"),
    ],
)
def test_fallbacks_on_a_gpu_are_found(others, detail):
    assert check_choices(chose()).passed
    assert check_choices(chose(**others, device="cpu")).passed
    outcome = check_choices(chose(**others))
    assert not outcome.passed
    assert detail in outcome.detail


def test_missing_graphs_fail_the_check_of_graphs():
    outcome = check_graphs(chose(**GRAPHS), chose(), (1, 3), 30)
    assert not outcome.passed
    assert "the model waits" in outcome.detail


def drawn(*logprobs: float) -> Drawn:
    """A result whose most likely tokens are 0, 1, …"""
    return Drawn(0, TokenLogprob(logprobs[0], 1, list(enumerate(logprobs))))


def test_verdicts():
    likely = drawn(-1.0, -2.0)
    words = "1 tokens: logprobs differ by 0 at most (allowed {}); {} clear choices agree"
    assert verdict([(likely, likely)], 0.1) == (True, words.format(0.1, "1 of 1"))
    assert verdict([(likely, likely)], 0.6) == (True, words.format(0.6, "0 of 0"))
    assert not verdict([], 0.1).passed
    assert not verdict([(likely, drawn(-1.3, -2.0))], 0.1).passed
    assert not verdict([(likely, Drawn(1, likely.logprob))], 0.1).passed
    second_choice = Drawn(1, likely.logprob)
    assert not verdict([(second_choice, likely)], 0.1).passed
    assert not verdict([(Drawn(0), Drawn(0))], 0.1).passed
    assert difference({1: 0.0, 2: 0.0, 3: 0.0}, {4: 0.0, 5: 0.0, 3: 0.0}) == inf


def test_continuations_are_compared_until_they_diverge():
    ours, theirs = ([Drawn(token) for token in tokens] for tokens in ([1, 2, 3, 4], [1, 2, 5, 6]))
    assert [(a.token, b.token) for a, b in together(ours, theirs)] == [(1, 1), (2, 2), (3, 5)]


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), min_size=1, max_size=30), st.randoms())
def test_idle_time_is_the_time_that_no_span_covers(pairs, source: random.Random):
    scale = 1000  # of nanoseconds: SHORTEST_GAP is 5 of these
    spans = [(start * scale, (start + length) * scale) for start, length in pairs]
    covered = {at for start, length in pairs for at in range(start, start + length)}
    gaps, run = [], 0
    for at in range(min(covered), max(covered) + 1):
        if at in covered:
            gaps, run = [*gaps, run], 0
        else:
            run += 1
    counted = [gap * scale * 1e-9 for gap in gaps if gap * scale * 1e-9 >= SHORTEST_GAP]
    source.shuffle(spans)
    idle = uncovered(spans)
    assert idle.total == pytest.approx(sum(counted))
    assert idle.longest == pytest.approx(max(counted, default=0))


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    """Runners of the tiny shape: with overlap, without overlap, and with different weights."""
    scale, folder = tiny_scale(), tmp_path_factory.mktemp("models")
    options = scale.options(6, 200, device="cpu", threads=1)
    with (
        served(scale.small, folder, **options, overlap=True) as ahead,
        served(scale.small, folder, **options, overlap=False) as plain,
        served(scale.small, folder, **options, max_attention_window=(8,)) as windowed,
    ):
        yield ahead, plain, windowed


def test_a_runner_that_differs_is_found(runners: tuple[Served, Served, Served]):
    ahead, plain, windowed = runners
    assert check_graphs(ahead, plain, (1, 3), 30).passed
    assert not check_graphs(ahead, windowed, (1, 3), 30).passed
    assert check_overlap(ahead, plain, 4, 30).passed
    assert not check_overlap(ahead, windowed, 4, 30).passed
    assert check_parity(plain, CPU, (3, 20), 3).passed
    assert not check_parity(windowed, CPU, (3, 20), 3).passed


def test_a_failed_draw_fails_parity():
    row = [torch.tensor([[0.0, -1.0]]).log_softmax(dim=-1)]
    likely = Drawn(0, TokenLogprob(float(row[0][0, 0]), 1, list(enumerate(row[0][0].tolist()))))
    assert checks.parity([[likely]], row, row).passed
    assert not checks.parity([[Drawn(0)]], row, row).passed


WORK = ((1, 3), (4, 30))


def test_ranks_that_differ_are_found(runners: tuple[Served, Served, Served]):
    ahead, plain, windowed = runners
    outcome = two_ranks.compare(ahead, plain, lambda: None, *WORK)
    assert outcome.passed
    assert "ended within 60 s" in outcome.detail
    assert not two_ranks.compare(ahead, windowed, lambda: None, *WORK).passed
    assert not two_ranks.compare(chose(cuda_graphs="none: another rank cannot"), plain, lambda: None, *WORK).passed


def test_ranks_that_do_not_exit_are_found(runners: tuple[Served, Served, Served], monkeypatch):
    monkeypatch.setattr(two_ranks, "CLOSE_SECONDS", 0.1)
    tested = threading.Event()
    outcome = two_ranks.compare(*runners[:2], tested.wait, *WORK)
    tested.set()
    assert not outcome.passed
    assert "did not end" in outcome.detail


def outputs(served_model: Served, mode: str) -> list[int]:
    core = measures._settled(served_model, mode, 1, 8, 4)
    core.advance(4)
    core.stop()
    return [drawn.token for drawn in core.drawn[0]][:5]


@pytest.mark.long
def test_modes_sample(runners: tuple[Served, Served, Served]):
    greedy, *sampled = (outputs(runners[1], mode) for mode in (measures.AS_SERVED, measures.FREE, measures.FLAT))
    assert greedy == outputs(runners[1], measures.EAGER)
    assert all(tokens != greedy for tokens in sampled)


def test_peaked_passes_few_tokens_and_flat_passes_many():
    """Logits like those of random weights in the smaller shape: hidden states of length 32, and weights of 0.02."""
    scores = 0.64 * torch.randn(3, SMALL.vocab_size, generator=torch.Generator().manual_seed(0))
    for mode, short in ((measures.PEAKED, False), (measures.FLAT, True)):
        draws = [Draw(measures.SAMPLING[mode], i, 0) for i in range(3)]
        assert Filtered.of(draws)(scores, widen=False).short.tolist() == [short] * 3


def test_the_bytes_that_a_step_reads(runners: tuple[Served, Served, Served]):
    plain = runners[1]
    heads = (plain.shape.config["num_key_value_heads"], plain.shape.config["head_dim"])
    layers = plain.shape.config["num_hidden_layers"]
    assert plain.token_bytes == KVCache.block_bytes(layers, 1, *heads, torch.float32)
    weights = {name: weight.numel() for name, weight in twin(plain, CPU).named_parameters()}
    assert plain.weight_bytes == 4 * sum(weights.values())
    assert plain.shape.matrices == sum(count for name, count in weights.items() if "proj" in name)


def test_a_step_reads_only_the_experts_that_its_tokens_choose():
    shape = tiny_sparse()
    config = Qwen3Moe.read_config(shape.config)
    place = Place(torch.bfloat16, torch.device("meta"))
    targets = Qwen3Moe(config, ReferenceAttention(config.heads), place).targets()
    sizes = {name: target.numel() for name, target in targets.items() if target.dim() == 2}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    router = sum(size for name, size in sizes.items() if name.endswith("mlp.gate.weight"))
    assert shape.experts == experts
    assert shape.weights == sum(sizes.values()) - router
    assert shape.matrices == shape.weights - shape.head - experts * 6 // 8
    size = 2 * shape.head + (shape.weights - shape.head) // 2
    held = Served(shape, None, None, None, torch.bfloat16, size)
    assert held.step_bytes(1) == pytest.approx(size - experts * 6 / 8 / 2)
    assert held.step_bytes(2) == pytest.approx(size - experts * (6 / 8) ** 2 / 2)


def test_the_shape_with_experts():
    """A quarter of the layers of a model with 30.5e9 elements, 3.3e9 for each token, 0.6e9 of embedding and head."""
    assert 29.8e9 < 4 * (SPARSE.weights - SPARSE.head - SPARSE.embedding) < 30.0e9
    assert 2.6e9 < 4 * SPARSE.matrices < 2.8e9


@pytest.mark.long
def test_a_step_reads_only_the_needed_rows_of_an_untied_embedding():
    assert SMALL.embedding == 0
    assert LARGE.embedding == 151936 * 4096
    assert 8.0e9 < LARGE.weights < 8.3e9
    assert 5.9e8 < SMALL.weights < 6.1e8
