"""Where a resumed request goes on: the tokens that its caller has, and the model that generated them."""

import re
from collections.abc import Mapping, Sequence

from router.errors import Reason, Violations, shown
from router.validate.adapter import VERSION, Began, split_fingerprint
from router.validate.model import Model
from router.validate.sampling import Stopping
from sluice.v1 import generation_pb2 as pb

FINGERPRINT = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)


def parse_resume(
    given: Sequence[pb.ResumeFrom], n: int, stopping: Stopping, model: Model, bad: Violations
) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    most = stopping.max_tokens or model.max_context_tokens
    for i, part in enumerate(given):
        field = f"spec.resume[{i}]"
        if part.index >= n:
            bad.add(f"{field}.index", f"is {part.index}, must be less than n, which is {n}", reason=Reason.OUT_OF_RANGE)
            return {}
        if part.index in found:
            bad.add(f"{field}.index", f"is {part.index}, which was given before", reason=Reason.DUPLICATE)
            return {}
        if bad.at_most(f"{field}.token_ids", len(part.token_ids), most, "ids"):
            bad.token_ids(f"{field}.token_ids", part.token_ids, model.vocab_size)
        found[part.index] = tuple(part.token_ids)
    return found


def parse_began(given: Sequence[pb.ResumeFrom], bad: Violations) -> Began:
    found = given[0].model_fingerprint if given else ""
    began = split_fingerprint(found)
    versions = [version for version in began[1:] if version]
    if found and not (FINGERPRINT.fullmatch(began.model) and all(map(VERSION.fullmatch, versions))):
        bad.add(
            "spec.resume[0].model_fingerprint",
            f"is {shown(found)}, must be what Started returned",
            reason=Reason.CONFLICT,
        )
        return Began()
    for i, part in enumerate(given):
        if part.model_fingerprint != found:
            both = f"is {shown(part.model_fingerprint)} and that of spec.resume[0] {shown(found)}: they must be equal"
            bad.add(f"spec.resume[{i}].model_fingerprint", both, reason=Reason.CONFLICT)
            break
    return began


def check_seed(resumed: Mapping[int, tuple[int, ...]], greedy: bool, seed_given: bool, bad: Violations) -> None:
    # Only the seed that drew the tokens so far continues the same sequence.
    if any(resumed.values()) and not greedy and not seed_given:
        field = "spec.sampling.seed"
        bad.add(
            field,
            "is not set: with resume and a temperature above 0 it must be what Started returned",
            reason=Reason.MISSING,
        )
