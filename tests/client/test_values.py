"""Token ids and draft logits as numpy's arrays and torch's tensors: accepted, or refused with the place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sluice.client import InvalidRequest
from sluice.client.requests import build_spec, detokenize_request
from sluice.client.results import Tensor

TAKERS: dict[str, Callable[[Any], Any]] = {
    "spec.token_ids": lambda ids: build_spec(ids, {}).token_ids.ids,
    "token_ids": lambda ids: detokenize_request(ids, "", None).token_ids,
    "spec.sampling.bad_token_ids": lambda ids: build_spec("x", {"bad_token_ids": ids}).sampling.bad_token_ids,
    "spec.sampling.allowed_token_ids": lambda ids: (
        build_spec("x", {"allowed_token_ids": ids}).sampling.allowed_token_ids
    ),
    "spec.stopping.stop_token_ids": lambda ids: build_spec("x", {"stop_token_ids": ids}).stopping.stop_token_ids,
    "spec.speculation.draft_token_ids": lambda ids: (
        build_spec("x", {"speculation": {"draft_token_ids": ids}}).speculation.draft_token_ids
    ),
}
"""By the place that errors name: the ids of the request that a client sends."""


@pytest.mark.parametrize("place", TAKERS)
@pytest.mark.parametrize(
    "ids",
    [np.array([3, 7]), np.array([3, 7], np.uint16), torch.tensor([3, 7]), [*np.array([3, 7])], [*torch.tensor([3, 7])]],
    ids=["numpy", "uint16", "torch", "list of numpy", "list of torch"],
)
def test_integers_of_one_dimension_are_accepted(place, ids) -> None:
    assert list(TAKERS[place](ids)) == [3, 7]


@pytest.mark.parametrize("place", TAKERS)
@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_others_are_refused_with_their_place(place, make) -> None:
    for values, wrong in (([3.5, 7.0], "3.5"), ([[3, 7]], "[3, 7]")):
        with pytest.raises(TypeError) as caught:
            TAKERS[place](make(values))
        assert str(caught.value) == f"{place}[0] must be an integer (got {wrong})"
    with pytest.raises(TypeError, match="must be"):
        TAKERS[place](make(3))


def test_a_list_of_arrays_is_several_prompts() -> None:
    with pytest.raises(TypeError, match=r"a call takes one prompt \(got a list of 2\)"):
        build_spec([np.array([1]), np.array([2])], {})


ROWS = torch.tensor([[0.5, -1.25, 3.0], [-torch.inf, 2.0, 0.0]])


def sent_draft_logits(logits):
    return build_spec(
        "x", {"speculation": {"draft_token_ids": [1, 2], "draft_logits": logits}}
    ).speculation.draft_logits


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors(dtype) -> None:
    # A view whose rows are not contiguous.
    draft_logits = sent_draft_logits(torch.stack([ROWS, ROWS], dim=1).to(getattr(torch, dtype)).requires_grad_()[:, 0])
    assert draft_logits.dtype == dtype
    assert np.array_equal(Tensor(0, "", 0, False, (2, 3), draft_logits.dtype, draft_logits.data).array(), ROWS.numpy())


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<f8"])
def test_arrays(dtype) -> None:
    draft_logits = sent_draft_logits(ROWS.numpy().astype(dtype))
    assert draft_logits.dtype == ("float16" if dtype == "<f2" else "float32")
    assert np.array_equal(Tensor(0, "", 0, False, (2, 3), draft_logits.dtype, draft_logits.data).array(), ROWS.numpy())


def test_a_mapping_is_sent_unchanged() -> None:
    assert sent_draft_logits({"dtype": "float16", "data": b"ab"}).data == b"ab"


@pytest.mark.parametrize(
    ("logits", "error", "message"),
    [
        (ROWS[0], InvalidRequest, r"draft_logits has the shape \(3,\)"),
        (ROWS.long(), InvalidRequest, "int64"),
        ([[1.0]], TypeError, "list"),
    ],
    ids=["a row", "integers", "a list"],
)
def test_invalid_arrays(logits, error, message) -> None:
    with pytest.raises(error, match=message):
        sent_draft_logits(logits)
