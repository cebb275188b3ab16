"""What the caller has of a stream that broke: sluice.v1.ResumeFrom, bounded."""

import re
from collections.abc import Sequence

from router.validate.model import Model
from router.validate.stopping import Stopping
from router.validate.violations import Violations, shown
from sluice.v1 import generation_pb2

FIELD = "spec.resume"
MODEL = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)


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


def parse_model(given: Sequence[generation_pb2.ResumeFrom], bad: Violations) -> str:
    """Fingerprint of the model of these tokens; empty where the caller does not tell."""
    found = given[0].model_fingerprint if given else ""
    if found and not MODEL.fullmatch(found):
        bad.add(f"{FIELD}[0].model_fingerprint", f"is {shown(found)}, must be what Started returned")
    for i, part in enumerate(given):
        if part.model_fingerprint != found:
            of = f"is {shown(part.model_fingerprint)} and that of {FIELD}[0] {shown(found)}: they must be equal"
            bad.add(f"{FIELD}[{i}].model_fingerprint", of)
            break
    return found


def check_seed(resumed: dict[int, tuple[int, ...]], greedy: bool, seed_given: bool, bad: Violations) -> None:
    """Sampled tokens can only be followed by those of the same noise."""
    if any(resumed.values()) and not greedy and not seed_given:
        bad.add(
            "spec.sampling.seed", "is not set: with resume and a temperature above 0 it must be what Started returned"
        )
