"""Resumed requests: the tokens that the caller already has, and the model that generated them."""

import re
from collections.abc import Sequence

from router.errors import Reason, RequestError, Violations, shown
from router.parse.model import Began, ServedModel
from router.parse.sampling import Stopping
from sluice.v1 import generation_pb2 as pb
from sluice.wire.adapters import VERSION_BYTES
from sluice.wire.errors import ErrorCode

VERSION = re.compile(rf"[0-9a-f]{{{2 * VERSION_BYTES}}}", re.ASCII)
FINGERPRINT = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)


def parse_resume(
    spec: pb.GenerationSpec, n: int, greedy: bool, stopping: Stopping, model: ServedModel, bad: Violations
) -> dict[int, tuple[int, ...]]:
    """Tokens by index of the output. Must not be used if `bad` has violations."""
    tokens = _tokens(spec.resume, n, stopping, model, bad)
    # Only the seed with which the tokens so far were sampled continues the same sequence.
    if any(tokens.values()) and not greedy and not spec.sampling.HasField("seed"):
        problem = "is unset: with resume and a temperature above 0 it must be the seed that Started returned"
        bad.add("spec.sampling.seed", problem, reason=Reason.MISSING)
    return tokens


def _tokens(
    parts: Sequence[pb.ResumeFrom], n: int, stopping: Stopping, model: ServedModel, bad: Violations
) -> dict[int, tuple[int, ...]]:
    tokens: dict[int, tuple[int, ...]] = {}
    limit = stopping.max_tokens or model.max_context_tokens
    for i, part in enumerate(parts):
        field = f"spec.resume[{i}]"
        if part.index >= n:
            bad.add(f"{field}.index", f"is {part.index}, must be less than n, which is {n}", reason=Reason.OUT_OF_RANGE)
            return {}
        if part.index in tokens:
            bad.add(f"{field}.index", f"is {part.index}, which occurs twice", reason=Reason.DUPLICATE)
            return {}
        if bad.at_most(f"{field}.token_ids", len(part.token_ids), limit, "ids"):
            bad.token_ids(f"{field}.token_ids", part.token_ids, model.vocab_size)
        tokens[part.index] = tuple(part.token_ids)
    return tokens


def parse_began(parts: Sequence[pb.ResumeFrom], bad: Violations) -> Began:
    """The model and adapters with which the stream to be resumed began."""
    fingerprint, began = parts[0].model_fingerprint, began_of(parts)
    if fingerprint and not began.model:
        bad.add(
            "spec.resume[0].model_fingerprint",
            f"is {shown(fingerprint)}, must be the value that Started returned",
            reason=Reason.CONFLICT,
        )
        return Began()
    for i, part in enumerate(parts):
        if part.model_fingerprint != fingerprint:
            problem = f"is {shown(part.model_fingerprint)}, but that of spec.resume[0] is {shown(fingerprint)}"
            bad.add(f"spec.resume[{i}].model_fingerprint", problem, reason=Reason.CONFLICT)
            break
    return began


def began_of(parts: Sequence[pb.ResumeFrom]) -> Began:
    """Like `parse_began`, but does not report violations. Empty if there are any, or if there are no parts."""
    began = Began.read(parts[0].model_fingerprint if parts else "")
    versions = [version for version in began[1:] if version]
    return began if FINGERPRINT.fullmatch(began.model) and all(map(VERSION.fullmatch, versions)) else Began()


def changed(message: str) -> RequestError:
    return RequestError(ErrorCode.MODEL_CHANGED, message)
