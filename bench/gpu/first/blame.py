"""The layer at fault if a check of the whole engine fails: the check is repeated without one layer at a time."""

from collections.abc import Callable, Mapping
from typing import Any

from bench.gpu.findings import Check

Recheck = Callable[[Mapping[str, Any]], Check]

WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "CUDA graphs": {"cuda_graphs": False},
    "overlap": {"overlap": False},
    "fused kernels": {"fused_kernels": False},
    "an attention kernel": {"attention": "reference"},
    "all of these": {"cuda_graphs": False, "overlap": False, "fused_kernels": False, "attention": "reference"},
}


def blame(recheck: Recheck) -> tuple[str, list[str]]:
    """The layer at fault, if found, and the outcome of each trial."""
    told, holds = [], []
    for layer, options in WITHOUT.items():
        try:
            check = recheck(options)
        except Exception as error:  # noqa: BLE001 - the other layers must still be tried
            told.append(f"without {layer}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            continue
        told.append(f"without {layer}: {'holds' if check.passed else 'does not hold'}: {check.detail}")
        if check.passed:
            holds.append(layer)
    return _verdict(holds), told


def _verdict(holds: list[str]) -> str:
    alone = [layer for layer in holds if layer != "all of these"]
    if len(alone) == 1:
        return alone[0]
    if alone:
        return f"one of {', '.join(alone)}; it holds without any one of them"
    return "more than one layer" if holds else "something else: it does not hold without any of them"
