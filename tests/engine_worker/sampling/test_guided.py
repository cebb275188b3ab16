"""Applies guides' masks to scores after all other rules: row by row on a CPU, in a few operations on a GPU."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.sampling.choose import Greedy
from engine_worker.sampling.guided_draws import MaskedRows
from engine_worker.sampling.logit_edits import DeviceEdits, HostEdits
from engine_worker.sampling.rules import Edits, Penalized


def mask(ids, size: int) -> np.ndarray:
    words = np.zeros(-(-size // 32) + 1, np.uint32)
    for each in ids:
        words[each // 32] |= np.uint32(1 << each % 32)
    return words


def masked(masks: dict[int, np.ndarray]) -> MaskedRows:
    """Masks by row; the first mask in memory belongs to a draw of another group."""
    rows = np.array(list(masks))
    return MaskedRows(rows, np.stack([np.zeros_like(masks[rows[0]]), *masks.values()]), 1 + np.arange(len(rows)))


@pytest.mark.parametrize("edits", [DeviceEdits.of, lambda *rows: HostEdits(*rows[:2])], ids=["device", "host"])
@pytest.mark.parametrize("size", [31, 64, 101])
def test_only_allowed_tokens_remain(edits, size):
    generator = torch.Generator().manual_seed(size)
    scores = torch.randn(4, size, generator=generator)
    ids = {0: [0, 5, 30], 2: [size - 1], 3: range(size)}
    masks = masked({row: mask(each, size) for row, each in ids.items()})
    expected = scores.clone()
    for row, each in ids.items():
        banned = [i for i in range(size) if i not in each]
        expected[row, banned] = -torch.inf
    edited = scores.clone()
    edits({}, masks, size).apply(edited)
    assert torch.equal(edited, expected)


@pytest.mark.parametrize("edits", [DeviceEdits.of, lambda *rows: HostEdits(*rows[:2])], ids=["device", "host"])
def test_with_bans_and_penalties(edits):
    penalized = Penalized(np.array([1, 3]), 2.0, np.array([0.5, 0.25], np.float32))
    rows = {1: Edits([np.array([2])], penalized), 0: Edits([np.array([0])])}
    scores = torch.ones(2, 40)
    edits(rows, masked({1: mask([1, 2], 40)}), 40).apply(scores)
    assert scores[1].isfinite().nonzero().flatten().tolist() == [1]
    assert scores[1, 1] == 0.0
    assert scores[0].isfinite().nonzero().flatten().tolist() == list(range(1, 40))


@given(st.data())
def test_a_greedy_choice_equals_the_choice_after_applying_the_masks(data):
    size = data.draw(st.sampled_from([40, 2048, 2049]))
    some = st.lists(st.integers(0, size - 1), min_size=1, max_size=4)
    scores = torch.from_numpy(np.round(np.random.default_rng(data.draw(st.integers(0, 9))).normal(size=(3, size)), 1))
    scores = scores.to(torch.float32)
    rows, masks = {}, {}
    for row in data.draw(st.sets(st.integers(0, 2), min_size=1)):
        ids = data.draw(st.one_of(some, st.just([])))
        masks[row] = mask(ids if data.draw(st.booleans()) else set(range(size)) - set(ids), size)
        if data.draw(st.booleans()):
            rows[row] = Edits([np.array(data.draw(some))])
    edits, applied = HostEdits(rows, masked(masks)), scores.clone()
    edits.apply(applied)
    expected, chosen = Greedy()(applied, widen=True), edits.choose_greedily(scores)
    assert chosen.valid.tolist() == expected.valid.tolist()
    assert chosen.tokens[chosen.valid].tolist() == expected.tokens[expected.valid].tolist()
