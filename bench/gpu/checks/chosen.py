"""What the engine chose for itself: where it falls back to something slow, what made it do so is broken."""

from collections.abc import Mapping

from bench.gpu.findings import Check
from bench.gpu.served import Served

FALLBACKS = {"attention": "reference", "fused": "no:", "cuda_graphs": "none:"}
"""How a choice begins where it is one."""


def check(served: Served) -> Check:
    """On a GPU kernels for attention and for what lies between matrix products, and CUDA graphs."""
    choices = served.runner.choices
    missing = fallbacks(choices)
    taken = ", ".join(f"{name} = {choices[name]}" for name in FALLBACKS)
    return Check(f"no fallback, {served.shape.name}", not missing, "; ".join(missing.values()) or taken)


def fallbacks(choices: Mapping[str, str]) -> dict[str, str]:
    """By choice, which one it is and why; none on a CPU."""
    if choices["device"] == "cpu":
        return {}
    said = {**choices, "attention": f"{choices['attention']}: {choices['attention_reason']}"}
    return {name: f"{name} = {said[name]}" for name, no in FALLBACKS.items() if said[name].startswith(no)}
