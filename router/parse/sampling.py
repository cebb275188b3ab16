"""Sampling parameters and stopping criteria of a request, with all defaults applied."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.errors import Reason, Violations
from router.parse.model import Limits, ServedModel
from sluice.v1 import sampling_pb2 as pb
from sluice.wire.params import SAMPLING_RANGES, Range, SamplingParams

LOGIT_BIAS_RANGE = Range(-100, 100)


@dataclass(frozen=True, slots=True)
class Stopping:
    """Stopping criteria, before the prompt's length is known."""

    max_tokens: int | None
    """None stands for as many as fit into the context."""
    min_tokens: int
    strings: tuple[str, ...]
    token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    include_stop: bool


def parse_sampling(
    message: pb.SamplingParams, logprobs: int | None, model: ServedModel, limits: Limits, bad: Violations
) -> SamplingParams:
    """Unset fields get the model's defaults, an explicit zero stays zero, and a missing seed is chosen at random."""
    given: dict[str, Any] = _scalars(message, bad)
    if message.HasField("top_k"):
        given["top_k"] = model.top_k(message.top_k)
    if message.logit_bias:
        given["logit_bias"] = _logit_bias(message, model, limits, bad)
    if message.bad_token_ids or message.allowed_token_ids:
        given["bad_token_ids"], given["allowed_token_ids"] = _bans(message, model, limits, bad)
    if message.no_repeat_ngram_size:
        given["no_repeat_ngram_size"] = _ngram_size(message, limits, bad)
    seed = message.seed if message.HasField("seed") else secrets.randbits(63)
    return msgspec.structs.replace(model.sampling, **given, seed=seed, logprobs=logprobs)


def parse_stopping(message: pb.StoppingCriteria, model: ServedModel, limits: Limits, bad: Violations) -> Stopping:
    field = "spec.stopping"
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens == 0:
        bad.add(f"{field}.max_tokens", "is 0, must be at least 1", reason=Reason.OUT_OF_RANGE)
    limit = model.max_context_tokens if max_tokens is None else max_tokens
    if message.min_tokens > limit:
        source = "the context" if max_tokens is None else "max_tokens"
        bad.add(
            f"{field}.min_tokens",
            f"is {message.min_tokens}, must be at most {limit} ({source})",
            reason=Reason.OUT_OF_RANGE,
        )
    strings = parse_strings(f"{field}.stop", message.stop, limits.stop_strings, "stop strings", limits.stop_bytes, bad)
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        strings=tuple(dict.fromkeys(strings)),
        token_ids=bad.id_set(f"{field}.stop_token_ids", message.stop_token_ids, limits.listed_ids, model.vocab_size),
        eos_token_ids=() if message.ignore_eos else model.eos_token_ids,
        include_stop=message.include_stop_in_output,
    )


def _scalars(message: pb.SamplingParams, bad: Violations) -> dict[str, float]:
    """The fields of SAMPLING_RANGES that are set."""
    values = {field.name: value for field, value in message.ListFields() if field.name in SAMPLING_RANGES}
    for name, value in values.items():
        bad.within(f"spec.sampling.{name}", value, SAMPLING_RANGES[name])
    return values


def _logit_bias(
    message: pb.SamplingParams, model: ServedModel, limits: Limits, bad: Violations
) -> tuple[tuple[int, float], ...]:
    field = "spec.sampling.logit_bias"
    if not bad.at_most(field, len(message.logit_bias), limits.logit_bias, "entries"):
        return ()
    entries = tuple(sorted(message.logit_bias.items()))
    for token, bias in entries:
        if token >= model.vocab_size:
            bad.add(
                f"{field}[{token}]",
                f"is for token {token}, but the vocabulary has {model.vocab_size} tokens",
                reason=Reason.OUT_OF_RANGE,
            )
        bad.within(f"{field}[{token}]", bias, LOGIT_BIAS_RANGE)
    return entries


def _bans(
    message: pb.SamplingParams, model: ServedModel, limits: Limits, bad: Violations
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(bad_token_ids, allowed_token_ids); at least one token must remain."""
    bad_field, allowed_field = "spec.sampling.bad_token_ids", "spec.sampling.allowed_token_ids"
    banned = bad.id_set(bad_field, message.bad_token_ids, limits.listed_ids, model.vocab_size)
    allowed = bad.id_set(allowed_field, message.allowed_token_ids, limits.listed_ids, model.vocab_size)
    if allowed and not set(allowed) - set(banned):
        bad.add(
            allowed_field, f"allows {len(allowed)} tokens, all of which are in bad_token_ids", reason=Reason.CONFLICT
        )
    if not allowed and len(banned) >= model.vocab_size:
        bad.add(bad_field, f"bans all {model.vocab_size} tokens of the vocabulary", reason=Reason.CONFLICT)
    return banned, allowed


def _ngram_size(message: pb.SamplingParams, limits: Limits, bad: Violations) -> int:
    bad.within("spec.sampling.no_repeat_ngram_size", message.no_repeat_ngram_size, Range(0, limits.ngram_size))
    return message.no_repeat_ngram_size


def parse_strings(
    field: str, strings: Sequence[str], max_count: int, unit: str, max_bytes: int, bad: Violations
) -> tuple[str, ...]:
    if not bad.at_most(field, len(strings), max_count, unit):
        return ()
    for i, text in enumerate(strings):
        if not text:
            bad.add(f"{field}[{i}]", "is empty", reason=Reason.MISSING)
        bad.at_most(f"{field}[{i}]", len(text.encode()), max_bytes, "bytes")
    return tuple(strings)


def parse_count(field: str, count: int, model: ServedModel, limits: Limits, bad: Violations) -> int:
    bad.within(field, count, Range(0, limits.logprobs))
    return min(count, model.vocab_size)
