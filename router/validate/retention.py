"""Retention priorities of a request's KV cache blocks (sluice.v1.KvCacheOptions)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from router.errors import Range, Violations
from router.validate.model import Limits
from sluice.ring.params import DEFAULT_RETENTION, RangeRetention, RetentionParams
from sluice.v1 import generation_pb2

FIELD = "spec.kv_cache"
PRIORITY_RANGE = Range(0, 100)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token positions [start, end) of the prompt as sent, before truncation."""

    field: str
    start: int
    end: int | None
    """None: the end of the prompt."""
    priority: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Retention:
    """Before the prompt's length is known."""

    prompt: tuple[TokenRange, ...]
    """Sorted, without overlaps."""
    decode_priority: int
    decode_seconds: float | None

    def params(self, prompt_tokens: int, kept_tokens: int) -> RetentionParams:
        """Ranges shifted to a prompt of `prompt_tokens` that is truncated to its last `kept_tokens`.

        Raises RequestError INVALID_ARGUMENT for a range beyond the prompt.
        """
        bad = Violations()
        for part in self.prompt:
            if part.start >= prompt_tokens:
                bad.add(f"{part.field}.start", f"is {part.start}, the prompt has {prompt_tokens} tokens")
            elif part.end is not None and part.end > prompt_tokens:
                bad.add(f"{part.field}.end", f"is {part.end}, the prompt has {prompt_tokens} tokens")
        bad.raise_if_any()
        # Truncation drops the first tokens, so positions move to the front; ranges that end before it disappear.
        cut = prompt_tokens - kept_tokens
        bound = [
            RangeRetention(max(0, part.start - cut), (part.end or prompt_tokens) - cut, part.priority, part.seconds)
            for part in self.prompt
        ]
        return RetentionParams(tuple(part for part in bound if part.end > 0), self.decode_priority, self.decode_seconds)


def parse_retention(options: generation_pb2.KvCacheOptions, limits: Limits, bad: Violations) -> Retention:
    """The result is meaningless if `bad` has violations."""
    decode_priority = options.decode_priority if options.HasField("decode_priority") else DEFAULT_RETENTION
    bad.within(f"{FIELD}.decode_priority", decode_priority, PRIORITY_RANGE)
    return Retention(
        prompt=_prompt(options.prompt_retention, limits, bad),
        decode_priority=decode_priority,
        decode_seconds=(
            bad.duration(f"{FIELD}.decode_duration", options.decode_duration, limits.retention_time)
            if options.HasField("decode_duration")
            else None
        ),
    )


def _prompt(
    given: Sequence[generation_pb2.TokenRangeRetention], limits: Limits, bad: Violations
) -> tuple[TokenRange, ...]:
    field = f"{FIELD}.prompt_retention"
    if not bad.at_most(field, len(given), limits.retention_ranges, "ranges"):
        return ()
    parts = sorted(
        (_part(f"{field}[{i}]", part, limits, bad) for i, part in enumerate(given)), key=lambda part: part.start
    )
    for one, other in pairwise(parts):
        if one.end is None or one.end > other.start:
            end = "the end of the prompt" if one.end is None else one.end
            bad.add(
                f"{other.field}.start", f"is {other.start}, inside {one.field}, which goes from {one.start} to {end}"
            )
    return tuple(parts)


def _part(field: str, part: generation_pb2.TokenRangeRetention, limits: Limits, bad: Violations) -> TokenRange:
    end = part.end if part.HasField("end") else None
    if end is not None and end <= part.start:
        bad.add(f"{field}.end", f"is {end}, must be greater than start, which is {part.start}")
    bad.within(f"{field}.priority", part.priority, PRIORITY_RANGE)
    limit = limits.retention_time
    keep = bad.duration(f"{field}.duration", part.duration, limit) if part.HasField("duration") else None
    return TokenRange(field, part.start, end, part.priority, keep)
