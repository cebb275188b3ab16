"""How tokens are chosen and when a sequence stops: sluice.v1.SamplingParams and StoppingCriteria with all defaults."""

import secrets
from dataclasses import dataclass

import msgspec

from router.errors import Range, Violations
from router.validate.model import SAMPLING_RANGES, Limits, Model
from sluice.ring.params import SamplingParams
from sluice.v1 import sampling_pb2 as pb

LOGIT_BIAS_RANGE = Range(-100, 100)


@dataclass(frozen=True, slots=True)
class Stopping:
    """Stopping criteria, before the prompt's length is known."""

    max_tokens: int | None
    """None: as many as fit the context."""
    min_tokens: int
    strings: tuple[str, ...]
    token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    include_stop: bool


def parse_sampling(
    message: pb.SamplingParams, logprobs: int | None, model: Model, limits: Limits, bad: Violations
) -> SamplingParams:
    """An unset field gets the model's default, an explicit zero stays zero, a missing seed is drawn."""
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


def parse_stopping(message: pb.StoppingCriteria, model: Model, limits: Limits, bad: Violations) -> Stopping:
    field = "spec.stopping"
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens == 0:
        bad.add(f"{field}.max_tokens", "is 0, must be at least 1")
    most = model.max_context_tokens if max_tokens is None else max_tokens
    if message.min_tokens > most:
        bad.add(f"{field}.min_tokens", f"is {message.min_tokens}, more than max_tokens or the context: {most}")
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        strings=_stop_strings(message, limits, bad),
        token_ids=bad.id_set(f"{field}.stop_token_ids", message.stop_token_ids, limits.listed_ids, model.vocab_size),
        eos_token_ids=() if message.ignore_eos else model.eos_token_ids,
        include_stop=message.include_stop_in_output,
    )


def _scalars(message: pb.SamplingParams, bad: Violations) -> dict[str, float]:
    """The fields of SAMPLING_RANGES that are set."""
    found = {field.name: value for field, value in message.ListFields() if field.name in SAMPLING_RANGES}
    for name, value in found.items():
        bad.within(f"spec.sampling.{name}", value, SAMPLING_RANGES[name])
    return found


def _logit_bias(
    message: pb.SamplingParams, model: Model, limits: Limits, bad: Violations
) -> tuple[tuple[int, float], ...]:
    field = "spec.sampling.logit_bias"
    if not bad.at_most(field, len(message.logit_bias), limits.logit_bias, "entries"):
        return ()
    entries = tuple(sorted(message.logit_bias.items()))
    for token, bias in entries:
        if token >= model.vocab_size:
            bad.add(f"{field}[{token}]", f"is for token {token}, the vocabulary has {model.vocab_size} tokens")
        bad.within(f"{field}[{token}]", bias, LOGIT_BIAS_RANGE)
    return entries


def _bans(
    message: pb.SamplingParams, model: Model, limits: Limits, bad: Violations
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(bad_token_ids, allowed_token_ids); at least one token must remain."""
    bad_field, allowed_field = "spec.sampling.bad_token_ids", "spec.sampling.allowed_token_ids"
    banned = bad.id_set(bad_field, message.bad_token_ids, limits.listed_ids, model.vocab_size)
    allowed = bad.id_set(allowed_field, message.allowed_token_ids, limits.listed_ids, model.vocab_size)
    if allowed and not set(allowed) - set(banned):
        bad.add(allowed_field, f"allows {len(allowed)} tokens, all of which are in bad_token_ids")
    if not allowed and len(banned) >= model.vocab_size:
        bad.add(bad_field, f"bans all {model.vocab_size} tokens of the vocabulary")
    return banned, allowed


def _stop_strings(message: pb.StoppingCriteria, limits: Limits, bad: Violations) -> tuple[str, ...]:
    field = "spec.stopping.stop"
    if not bad.at_most(field, len(message.stop), limits.stop_strings, "stop strings"):
        return ()
    for i, stop in enumerate(message.stop):
        if not stop:
            bad.add(f"{field}[{i}]", "is empty")
        bad.at_most(f"{field}[{i}]", len(stop.encode()), limits.stop_bytes, "bytes")
    # Without duplicates, in the caller's order.
    return tuple(dict.fromkeys(message.stop))
