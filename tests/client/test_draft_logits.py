"""Conversion of arrays and tensors to draft logits."""

import numpy as np
import pytest
import torch

from sluice.client import InvalidRequest
from sluice.client.requests import build_spec
from sluice.client.results import Tensor

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
