"""How the next token is chosen: sluice.v1.SamplingParams with every default filled in."""

import secrets

import msgspec

from router.validate.limits import Limits
from router.validate.model import Model
from router.validate.ranges import LOGIT_BIAS_RANGE, SAMPLING_RANGES
from router.validate.violations import Violations
from sluice.ring.params import SamplingParams
from sluice.v1 import sampling_pb2

FIELD = "spec.sampling"


def parse_sampling(
    message: sampling_pb2.SamplingParams, logprobs: int | None, model: Model, limits: Limits, bad: Violations
) -> SamplingParams:
    """Unset is the model's default; an explicit zero is a zero. A seed is drawn where there is none."""
    banned, allowed = _bans(message, model, limits, bad)
    return msgspec.structs.replace(
        model.sampling,
        **_scalars(message, bad),
        top_k=model.top_k(message.top_k) if message.HasField("top_k") else model.sampling.top_k,
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        logit_bias=_logit_bias(message, model, limits, bad),
        bad_token_ids=banned,
        allowed_token_ids=allowed,
        logprobs=logprobs,
    )


def _scalars(message: sampling_pb2.SamplingParams, bad: Violations) -> dict[str, float]:
    """Those that are set."""
    found = {field.name: value for field, value in message.ListFields() if field.name in SAMPLING_RANGES}
    for name, value in found.items():
        bad.within(f"{FIELD}.{name}", value, SAMPLING_RANGES[name])
    return found


def _logit_bias(
    message: sampling_pb2.SamplingParams, model: Model, limits: Limits, bad: Violations
) -> tuple[tuple[int, float], ...]:
    field = f"{FIELD}.logit_bias"
    if not bad.at_most(field, len(message.logit_bias), limits.logit_bias, "entries"):
        return ()
    entries = tuple(sorted(message.logit_bias.items()))
    for token, bias in entries:
        if token >= model.vocab_size:
            bad.add(f"{field}[{token}]", f"is for token {token}, the vocabulary has {model.vocab_size} tokens")
        bad.within(f"{field}[{token}]", bias, LOGIT_BIAS_RANGE)
    return entries


def _bans(
    message: sampling_pb2.SamplingParams, model: Model, limits: Limits, bad: Violations
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    banned = bad.ids(f"{FIELD}.bad_token_ids", message.bad_token_ids, limits.listed_ids, model.vocab_size)
    allowed = bad.ids(f"{FIELD}.allowed_token_ids", message.allowed_token_ids, limits.listed_ids, model.vocab_size)
    if allowed and not set(allowed) - set(banned):
        bad.add(f"{FIELD}.allowed_token_ids", f"allows {len(allowed)} tokens, all of which are in bad_token_ids")
    if not allowed and len(banned) >= model.vocab_size:
        bad.add(f"{FIELD}.bad_token_ids", f"bans all {model.vocab_size} tokens of the vocabulary")
    return banned, allowed
