"""What the caller has of a stream that broke: sluice.v1.ResumeFrom, bounded."""

from collections.abc import Sequence

from router.model import Model
from router.validate.stopping import Stopping
from router.validate.violations import Violations
from sluice.v1 import generation_pb2

FIELD = "spec.resume"


def parse_resume(
    given: Sequence[generation_pb2.ResumeFrom], n: int, stopping: Stopping, model: Model, bad: Violations
) -> dict[int, tuple[int, ...]]:
    """Tokens by output."""
    found: dict[int, tuple[int, ...]] = {}
    most = stopping.max_tokens or model.max_context_tokens
    for i, part in enumerate(given):
        if part.index >= n:
            bad.add(f"{FIELD}[{i}].index", f"is {part.index}, must be less than n, which is {n}")
            return {}
        if part.index in found:
            bad.add(f"{FIELD}[{i}].index", f"is {part.index}, which was named before")
            return {}
        field = f"{FIELD}[{i}].token_ids"
        if bad.at_most(field, len(part.token_ids), most, "ids"):
            bad.token_ids(field, part.token_ids, model.vocab_size)
        found[part.index] = tuple(part.token_ids)
    return found


def check_seed(resumed: dict[int, tuple[int, ...]], greedy: bool, seed_given: bool, bad: Violations) -> None:
    """Sampled tokens can only be followed by those of the same noise."""
    if any(resumed.values()) and not greedy and not seed_given:
        bad.add(
            "spec.sampling.seed", "is not set: with resume and a temperature above 0 it must be what Started returned"
        )
