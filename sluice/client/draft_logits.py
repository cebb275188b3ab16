"""Conversion of arrays to sluice.v1.DraftLogits."""

from collections.abc import Mapping
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def pack_draft_logits(logits: Any) -> Mapping[str, Any]:
    """Convert a numpy array or a torch tensor [draft tokens, vocabulary]; a mapping is returned as it is.

    float64 becomes float32. Requires numpy. Raises ValueError for another shape or dtype, TypeError for another type.
    """
    if isinstance(logits, Mapping):
        return logits
    if not (hasattr(logits, "shape") and hasattr(logits, "dtype")):
        raise TypeError(f"draft_logits must be an array or a mapping of dtype and data, not {type(logits).__name__}")
    if len(logits.shape) != 2:
        raise ValueError(f"draft_logits has the shape {tuple(logits.shape)}, must be [draft tokens, vocabulary]")
    name = getattr(logits.dtype, "name", None) or str(logits.dtype).removeprefix("torch.")
    dtype = "float32" if name == "float64" else name
    if dtype not in DTYPES:
        raise ValueError(f"draft_logits has the dtype {dtype}, must be one of {', '.join(DTYPES)}")
    import numpy as np

    if hasattr(logits, "detach"):
        import torch

        logits = logits.detach().cpu()
        # numpy has no bfloat16.
        logits = (logits.view(torch.int16) if dtype == "bfloat16" else logits).numpy()
    kind = {"float32": "<f4", "float16": "<f2", "bfloat16": "<i2"}[dtype]
    return {"dtype": dtype, "data": np.ascontiguousarray(logits, kind).tobytes()}
