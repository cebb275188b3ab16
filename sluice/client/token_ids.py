"""Ids as Python's, numpy's or torch's integers, one by one or as arrays and tensors."""

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from sluice.client.refused_values import must_be


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
