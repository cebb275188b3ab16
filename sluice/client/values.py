"""Converts option values from the types that Python programs use: arrays, tensors, mappings and Pydantic models."""

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import index
from sys import byteorder
from typing import Any, TypedDict

from sluice.client.refused_values import must_be

DRAFT_LOGITS_DTYPES = ("float32", "bfloat16", "float16")


def is_array(value: object) -> bool:
    """Whether `value` is a numpy array or a torch tensor with at least one dimension."""
    return hasattr(value, "tolist") and bool(getattr(value, "shape", ()))


def is_id(value: object) -> bool:
    """Whether `value` is an integer: Python's, numpy's, or a tensor without dimensions."""
    return isinstance(value, int) or (hasattr(value, "__index__") and not is_array(value))


def as_id(argument: str, value: Any) -> int:
    """Raises TypeError, which names the argument, unless `value` is an integer."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(must_be(argument, "an integer", value)) from None


def as_ids(argument: str, values: Any) -> list[int]:
    """The integers of a list, or of an array or tensor of one dimension. Raises TypeError, which names the place."""
    if isinstance(values, str | bytes | Mapping) or is_id(values) or not isinstance(values, Iterable):
        raise TypeError(must_be(argument, "a list of integers", values))
    items = values.tolist() if hasattr(values, "tolist") else list(values)
    try:
        return list(map(index, items))
    except TypeError:
        return [as_id(f"{argument}[{i}]", item) for i, item in enumerate(items)]


class Embeddings(TypedDict):
    """Rows of embeddings."""

    shape: Sequence[int]
    """[rows, hidden size]"""
    dtype: str
    """"float32", "float16" or "bfloat16"."""
    data: bytes
    """Row-major, little-endian."""


def embeddings_of(rows: Any) -> Embeddings:
    """Convert a torch tensor, a numpy array or lists of numbers [rows, hidden size], or check an `Embeddings`.

    Numbers of other types than float32, float16 and bfloat16 become float32. Raises TypeError.
    """
    if isinstance(rows, Mapping):
        if rows.keys() != Embeddings.__annotations__.keys():
            raise TypeError(f"embeddings must have shape, dtype and data, not {', '.join(map(str, rows))}")
        return Embeddings(shape=rows["shape"], dtype=rows["dtype"], data=rows["data"])
    if hasattr(rows, "detach"):
        return _of_tensor(rows)
    if hasattr(rows, "tobytes") and hasattr(rows, "astype"):
        return _of_array(rows)
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise TypeError(f"embeddings must be an array or a tensor [rows, hidden size], not {type(rows).__name__}")
    return _of_lists(rows)


def _of_tensor(tensor: Any) -> Embeddings:
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) != "torch.bfloat16":
        return _of_array(tensor.numpy())
    # numpy has no bfloat16, which is the upper half of a float32.
    halves = tensor.float().contiguous().numpy().view("u4") >> 16
    return Embeddings(shape=list(tensor.shape), dtype="bfloat16", data=halves.astype("<u2").tobytes())


def _of_array(values: Any) -> Embeddings:
    name = values.dtype.name if values.dtype.name in ("float32", "float16") else "float32"
    data = values.astype({"float32": "<f4", "float16": "<f2"}[name]).tobytes()
    return Embeddings(shape=list(values.shape), dtype=name, data=data)


def _of_lists(rows: Sequence[Sequence[float]]) -> Embeddings:
    sizes = {len(row) for row in rows}
    if len(sizes) > 1:
        raise TypeError(f"embeddings must have rows of equal length (got {', '.join(map(str, sorted(sizes)))})")
    packed = array("f", (value for row in rows for value in row))
    if byteorder == "big":
        packed.byteswap()
    return Embeddings(shape=[len(rows), sizes.pop() if sizes else 0], dtype="float32", data=packed.tobytes())


def pack_draft_logits(logits: Any) -> Mapping[str, Any]:
    """The fields of sluice.v1.DraftLogits, from a numpy array or a torch tensor [draft tokens, vocabulary].

    A mapping is returned as it is. float64 becomes float32. Requires numpy. Raises ValueError for another shape or
    dtype, TypeError for another type.
    """
    if isinstance(logits, Mapping):
        return logits
    if not (hasattr(logits, "shape") and hasattr(logits, "dtype")):
        raise TypeError(f"draft_logits must be an array or a mapping of dtype and data, not {type(logits).__name__}")
    if len(logits.shape) != 2:
        raise ValueError(f"draft_logits has the shape {tuple(logits.shape)}, must be [draft tokens, vocabulary]")
    name = getattr(logits.dtype, "name", None) or str(logits.dtype).removeprefix("torch.")
    if name not in (*DRAFT_LOGITS_DTYPES, "float64"):
        raise ValueError(f"draft_logits has the dtype {name}, must be one of {', '.join(DRAFT_LOGITS_DTYPES)}")
    packed = _of_tensor(logits) if hasattr(logits, "detach") else _of_array(logits)
    return {"dtype": packed["dtype"], "data": packed["data"]}


def is_model(value: Any) -> bool:
    """Whether the value is a Pydantic model."""
    return isinstance(value, type) and hasattr(value, "model_json_schema")


def guide_fields(guide: Any) -> Any:
    """The fields of sluice.v1.GuidedDecoding. A value of another type is returned as it is.

    The guide itself may be a Pydantic model in place of `{"json_schema": model}`. `json_schema` and `structural_tag`
    may be mappings in place of JSON texts, `json_schema` also a Pydantic model, `choice` the list of texts, and
    `json_object` True. Raises TypeError or ValueError for a mapping that is not JSON.
    """
    if is_model(guide):
        guide = {"json_schema": guide}
    if not isinstance(guide, Mapping):
        return guide
    fields = {name: _guide_field(name, value) for name, value in guide.items()}
    return {name: value for name, value in fields.items() if value is not None}


def _guide_field(name: str, value: Any) -> Any:
    match name:
        case "json_schema" | "structural_tag" if isinstance(value, Mapping):
            return json.dumps(value)
        case "json_schema" if is_model(value):
            return json.dumps(value.model_json_schema())
        case "choice" if isinstance(value, Sequence) and not isinstance(value, str):
            return {"choices": value}
        case "json_object" if isinstance(value, bool):
            return {} if value else None
    return value
