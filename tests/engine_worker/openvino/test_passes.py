"""A step that is computed in several passes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_worker.openvino.arrays import divided_rows, requested_rows
from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.openvino.passes import LEAST_TOKENS, divide
from engine_worker.step import NO_LIMIT, Draw, Kept, Scored, Slice
from sluice import tiny_model
from sluice.settings.engine import OPENVINO_BLOCK
from sluice.wire.params import SamplingParams
from tests.engine_worker.openvino.loaded import load
from tests.examples import examples

DRAW = Draw(SamplingParams(temperature=0.0), 0, 0)


@st.composite
def steps(draw) -> list[Slice]:
    """Slices whose tokens are all different, with draws, drafts and requested rows."""
    slices, first = [], 0
    for _ in range(draw(st.integers(1, 6))):
        count = draw(st.one_of(st.just(1), st.integers(1, 20), st.integers(2, 400)))
        start = draw(st.integers(0, 100))
        drafts = draw(st.sampled_from([0, 0, 0, min(5, count - 1)]))
        at = draw(st.integers(0, count - 1))
        kept = (Kept(start + at, count - at, ("logits",), True),) if draw(st.booleans()) else ()
        scored = Scored(start, [0] * count, 0) if draw(st.booleans()) else None
        tokens, follows = list(range(first, first + count)), draw(st.sampled_from([None, 7]))
        slices.append(Slice(tokens, start, [], (DRAW,) * (1 + drafts), follows, drafts, scored, kept))
        first += count
    return slices


@examples(300)
@given(steps(), st.sampled_from([LEAST_TOKENS, 96, 512]))
def test_each_pass_is_short_and_all_tokens_are_computed_in_their_order(slices, most):
    passes = divide(slices, most)
    assert all(0 < sum(len(part.tokens) for part in one) <= most for one in passes)
    parts = [part for one in passes for part in one]
    for whole in slices:
        tokens = []
        while len(tokens) < len(whole.tokens):
            part = parts.pop(0)
            assert part.start == whole.start + len(tokens)
            tokens += part.tokens
            if len(tokens) < len(whole.tokens):
                assert (part.start + len(part.tokens)) % OPENVINO_BLOCK == 0
                assert (part.draws, part.drafts, part.follows) == ((), 0, None)
            assert len(part.tokens) > 1 or len(whole.tokens) == 1
        assert tokens == whole.tokens
        assert (part.draws, part.drafts, part.follows) == (whole.draws, whole.drafts, whole.follows)
        assert len(part.tokens) > whole.drafts
    assert not parts


@examples(300)
@given(steps(), st.sampled_from([LEAST_TOKENS, 96]))
def test_requested_rows_come_in_the_order_of_the_undivided_step(slices, most):
    rows, passes = requested_rows(slices), divide(slices, most)
    shares, order = divided_rows(rows, passes)
    tokens = [[token for part in one for token in part.tokens] for one in passes]
    returned = [of_pass[index] for of_pass, share in zip(tokens, shares, strict=True) for index in share]
    # A token's id is its index.
    assert np.array(returned, np.int64)[order].tolist() == rows


def test_a_slice_whose_draws_need_a_longer_pass_is_not_cut():
    before, long = Slice([1], 0, [0], (DRAW,)), Slice(list(range(100)), 0, [], (DRAW,) * 90, drafts=89)
    assert divide([before, long], LEAST_TOKENS) == [[before], [long]]


@pytest.mark.parametrize("options", [{}, {"lora": True}], ids=str)
def test_logits_and_requested_rows_are_those_of_one_pass(options):
    forward = load(tiny_model.path(), output_layers=(1,), **options)._forward
    tokens = [(7 * i + 3) % 4000 for i in range(300)]
    rows = {"scored": Scored(30, tokens[31:131], 0), "kept": (Kept(10, 200, ("logits",), True),)}
    follower = Slice([0], 0, [11], (DRAW,), follows=1)
    slices = [
        Slice(tokens[:210], 0, list(range(7)), (DRAW,), **rows),
        Slice(tokens[:40], 0, [7, 8], (DRAW,)),
        *[replace(follower, block_table=[12 + i]) for i in range(70)],
        Slice(tokens[:99], 0, [9, 10, 11, 82], (DRAW,) * 3, drafts=2, kept=(Kept(96, 3, ("logits",), False),)),
    ]
    whole, divided = (_compute(forward, slices, most) for most in (NO_LIMIT, LEAST_TOKENS))
    assert len(whole[0]) == 1 + 1 + 70 + 3
    assert len(whole[1]) == 100 + 200 + 3
    for expected, computed in zip(whole, divided, strict=True):
        assert torch.allclose(computed, expected, atol=1e-4)


def _compute(forward: OpenVinoForward, slices: list[Slice], most: int) -> list[torch.Tensor]:
    """Logits to sample from; then of the requested rows, hidden states, logits and the output layer."""
    forward._pass_tokens = most
    step = forward.arrays(slices)
    assert step.follows
    assert step.has_rows
    step.follow(torch.tensor([5, 6]))
    taken = []
    logits = forward.logits(
        (), step, lambda *rows: taken.append([rows[0].clone(), rows[1].clone(), rows[2][1].clone()])
    )
    return [logits.clone(), *map(torch.cat, zip(*taken, strict=True))]
