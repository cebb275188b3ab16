"""Rows of embeddings as callers have them, as the fields of sluice.v1.Embeddings."""

from array import array
from collections.abc import Mapping, Sequence
from sys import byteorder
from typing import Any, TypedDict


class Embeddings(TypedDict):
    shape: Sequence[int]
    """Rows, hidden size."""
    dtype: str
    """"float32", "float16" or "bfloat16"."""
    data: bytes
    """Row-major, little-endian."""


def embeddings_of(rows: Any) -> Embeddings:
    """From a tensor of torch, a numpy array, lists of numbers, or such a mapping. Other types of numbers become
    float32. Raises TypeError."""
    if isinstance(rows, Mapping):
        if rows.keys() != Embeddings.__annotations__.keys():
            raise TypeError(f"embeddings have shape, dtype and data, not {', '.join(map(str, rows))}")
        return Embeddings(shape=rows["shape"], dtype=rows["dtype"], data=rows["data"])
    if hasattr(rows, "detach"):
        return _of_tensor(rows)
    if hasattr(rows, "tobytes") and hasattr(rows, "astype"):
        return _of_array(rows)
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise TypeError(f"embeddings are an array or a tensor [rows, hidden size], not {type(rows).__name__}")
    return _of_lists(rows)


def _of_tensor(tensor: Any) -> Embeddings:
    found = tensor.detach().cpu()
    if str(found.dtype) != "torch.bfloat16":
        return _of_array(found.numpy())
    # numpy has no bfloat16, which is the upper half of a float32.
    halves = found.float().contiguous().numpy().view("u4") >> 16
    return Embeddings(shape=list(found.shape), dtype="bfloat16", data=halves.astype("<u2").tobytes())


def _of_array(found: Any) -> Embeddings:
    name = found.dtype.name if found.dtype.name in ("float32", "float16") else "float32"
    data = found.astype({"float32": "<f4", "float16": "<f2"}[name]).tobytes()
    return Embeddings(shape=list(found.shape), dtype=name, data=data)


def _of_lists(rows: Sequence[Sequence[float]]) -> Embeddings:
    sizes = {len(row) for row in rows}
    if len(sizes) > 1:
        raise TypeError(f"embeddings have rows of different lengths: {', '.join(map(str, sorted(sizes)))}")
    packed = array("f", (value for row in rows for value in row))
    if byteorder == "big":
        packed.byteswap()
    return Embeddings(shape=[len(rows), sizes.pop() if sizes else 0], dtype="float32", data=packed.tobytes())
