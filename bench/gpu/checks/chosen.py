"""What the engine chose for itself: where it falls back to something slow, what made it do so is broken."""

from collections.abc import Mapping

from bench.gpu.findings import Check
from bench.gpu.served import Served


def check(served: Served) -> Check:
    """On a GPU a kernel for attention, and CUDA graphs."""
    choices = served.runner.choices
    missing = fallbacks(choices)
    taken = f"attention = {choices['attention']}, cuda_graphs = {choices['cuda_graphs']}"
    return Check(f"no fallback, {served.shape.name}", not missing, "; ".join(missing) or taken)


def fallbacks(choices: Mapping[str, str]) -> list[str]:
    """Of an engine on a GPU; none on a CPU."""
    if choices["device"] == "cpu":
        return []
    found = []
    if choices["attention"] == "reference":
        found.append(f"attention = reference: {choices['attention_because']}")
    if choices["cuda_graphs"].startswith("none"):
        found.append(f"cuda_graphs = {choices['cuda_graphs']}")
    return found
