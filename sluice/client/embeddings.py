"""Conversion of embeddings to the fields of sluice.v1.Embeddings."""

from array import array
from collections.abc import Mapping, Sequence
from sys import byteorder
from typing import Any, TypedDict


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
