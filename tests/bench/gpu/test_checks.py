"""Each check finds what it looks for."""

import random
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.checks import attention, graphs, overlap, parity
from bench.gpu.checks.kernels import Candidate, candidates
from bench.gpu.compare import Verdict, difference, together, verdict
from bench.gpu.findings import Skip
from bench.gpu.measures.idle import SHORTEST, between
from bench.gpu.scale import tiny_scale
from bench.gpu.served import Served, served
from bench.gpu.shapes import LARGE, SMALL
from bench.gpu.twin import twin
from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import KVCache
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.step import Drawn
from sluice.ring.wire import TokenLogprob

CPU = torch.device("cpu")
CASES = attention.cases((HeadShape(4, 2, 16),), (16,), 100, 2)


class Wrong(ReferenceAttention):
    """Right but for one thing."""

    def __init__(self, heads: HeadShape, what: str) -> None:
        super().__init__(heads)
        self._what = what

    def attend(self, query, key, value, cache, inputs, window=None):
        if self._what == "window":
            window = None if window is None else window + 1
        if self._what == "padding":
            cache.keys[-1] += 1
        out = super().attend(query, key, value, cache, inputs, window)
        if self._what == "nan":
            out[0, 0, 0] = torch.nan
        return out


def check_attention(make):
    return attention.check(Candidate("this", make), CASES, torch.float32, CPU)


def test_the_reference_is_itself():
    found = check_attention(lambda heads, window, size: ReferenceAttention(heads))
    assert found.passed
    assert found.name == "this = reference"


@pytest.mark.parametrize(
    ("what", "told"), [("window", "off by"), ("padding", "not where they belong"), ("nan", "off by inf")]
)
def test_a_wrong_backend_is_found(what, told):
    found = check_attention(lambda heads, window, size: Wrong(heads, what))
    assert not found.passed
    assert told in found.detail


def test_a_backend_that_cannot_be_had_is_skipped_with_its_reason():
    def refuse(*_):
        raise ValueError("it is not for this machine")

    with pytest.raises(Skip, match="not for this machine"):
        check_attention(refuse)
    found = {one.title: one for one in candidates(CPU, torch.float32)}
    assert attention.check(found.pop("cpu"), CASES, torch.float32, CPU).passed
    assert found
    for one in found.values():
        with pytest.raises(Skip, match="CUDA device"):
            attention.check(one, CASES, torch.float32, CPU)


def drawn(*logprobs: float) -> Drawn:
    """Whose likeliest tokens are 0, 1, …"""
    return Drawn(0, TokenLogprob(logprobs[0], 1, list(enumerate(logprobs))))


def test_verdicts():
    one = drawn(-1.0, -2.0)
    assert verdict([(one, one)], 0.1) == Verdict(1, 1, 1, 0.0, 0.1)
    assert verdict([(one, one)], 0.6).clear == 0
    assert not verdict([], 0.1).passed
    assert not verdict([(one, drawn(-1.3, -2.0))], 0.1).passed
    assert not verdict([(one, Drawn(1, one.logprob))], 0.1).agreed
    other = Drawn(1, one.logprob)
    assert not verdict([(other, one)], 0.1).passed
    assert not verdict([(Drawn(0), Drawn(0))], 0.1).passed
    assert difference({1: 0.0, 2: 0.0, 3: 0.0}, {4: 0.0, 5: 0.0, 3: 0.0}) == inf


def test_continuations_are_compared_until_they_part():
    ours, theirs = ([Drawn(token) for token in tokens] for tokens in ([1, 2, 3, 4], [1, 2, 5, 6]))
    assert [(a.token, b.token) for a, b in together(ours, theirs)] == [(1, 1), (2, 2), (3, 5)]


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 60)), min_size=1, max_size=30), st.randoms())
def test_idle_time_is_what_no_span_covers(pairs, source: random.Random):
    scale = 1000  # of nanoseconds: SHORTEST is 5 of these
    spans = [(start * scale, (start + length) * scale) for start, length in pairs]
    covered = {at for start, length in pairs for at in range(start, start + length)}
    gaps, run = [], 0
    for at in range(min(covered), max(covered) + 1):
        if at in covered:
            gaps, run = [*gaps, run], 0
        else:
            run += 1
    counted = [gap * scale * 1e-9 for gap in gaps if gap * scale * 1e-9 >= SHORTEST]
    source.shuffle(spans)
    found = between(spans)
    assert found.total == pytest.approx(sum(counted))
    assert found.longest == pytest.approx(max(counted, default=0))


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    """The tiny shape: with overlap, without, and with other weights."""
    scale, folder = tiny_scale(), tmp_path_factory.mktemp("models")
    options = scale.options(6, 200, device="cpu", threads=1)
    with (
        served(scale.small, folder, **options, overlap=True) as ahead,
        served(scale.small, folder, **options, overlap=False) as plain,
        served(scale.small, folder, **options, max_attention_window=(8,)) as other,
    ):
        yield ahead, plain, other


def test_a_runner_that_differs_is_found(runners: tuple[Served, Served, Served]):
    ahead, plain, other = runners
    assert graphs.check(ahead, plain, (1, 3), 30).passed
    assert not graphs.check(ahead, other, (1, 3), 30).passed
    assert overlap.check(ahead, plain, 4, 30).passed
    assert not overlap.check(ahead, other, 4, 30).passed
    assert parity.check(plain, CPU, (3, 20), 3).passed
    assert not parity.check(other, CPU, (3, 20), 3).passed


def test_what_a_step_reads(runners: tuple[Served, Served, Served]):
    plain = runners[1]
    heads = (plain.shape.config["num_key_value_heads"], plain.shape.config["head_dim"])
    layers = plain.shape.config["num_hidden_layers"]
    assert plain.token_bytes == KVCache.block_bytes(layers, 1, *heads, torch.float32)
    weights = {name: weight.numel() for name, weight in twin(plain, CPU).named_parameters()}
    assert plain.weight_bytes == 4 * sum(weights.values())
    assert plain.shape.matrices == sum(count for name, count in weights.items() if "proj" in name)


def test_a_step_reads_of_an_embedding_that_is_no_head_what_it_needs():
    assert SMALL.embedding == 0
    assert LARGE.embedding == 151936 * 4096
    assert 8.0e9 < LARGE.matrices + 2 * LARGE.embedding < 8.3e9
