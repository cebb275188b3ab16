"""How long engines keep the KV cache blocks of a prompt, by ranges of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from router.errors import Reason, Violations
from router.parse.model import Limits
from router.requests.part import Part
from sluice.v1 import generation_pb2 as pb
from sluice.wire.params import DEFAULT_RETENTION, Range, RangeRetention, RetentionParams

FIELD = "spec.kv_cache"
RETENTION_RANGE = Range(0, 100)


@dataclass(frozen=True)
class Retentions:
    fields = frozenset({"kv_cache.prompt_retention", "kv_cache.decode_priority", "kv_cache.decode_duration"})

    _limits: Limits

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "Retention":
        return parse_retention(message.kv_cache, self._limits, bad)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Token positions [start, end) of the prompt as sent, before truncation."""

    field: str
    start: int
    end: int | None
    """None stands for the end of the prompt."""
    priority: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Retention(Part):
    """Retention priorities as requested, before the prompt's length is known."""

    prompt: tuple[TokenRange, ...]
    """Sorted, without overlaps."""
    decode_priority: int
    decode_seconds: float | None

    def retention(self, _: RetentionParams, prompt_tokens: int, kept_tokens: int) -> RetentionParams:
        """Raises RequestError INVALID_ARGUMENT for a range beyond the prompt."""
        bad = Violations()
        for part in self.prompt:
            if part.start >= prompt_tokens:
                bad.add(
                    f"{part.field}.start",
                    f"is {part.start}, but the prompt has {prompt_tokens} tokens",
                    reason=Reason.OUT_OF_RANGE,
                )
            elif part.end is not None and part.end > prompt_tokens:
                bad.add(
                    f"{part.field}.end",
                    f"is {part.end}, but the prompt has {prompt_tokens} tokens",
                    reason=Reason.OUT_OF_RANGE,
                )
        bad.raise_if_any()
        # Truncation drops the first tokens, so positions shift; ranges within the dropped tokens disappear.
        cut = prompt_tokens - kept_tokens
        moved = [
            RangeRetention(max(0, part.start - cut), (part.end or prompt_tokens) - cut, part.priority, part.seconds)
            for part in self.prompt
        ]
        return RetentionParams(tuple(part for part in moved if part.end > 0), self.decode_priority, self.decode_seconds)


def parse_retention(options: pb.KvCacheOptions, limits: Limits, bad: Violations) -> Retention:
    """The result must not be used if `bad` has violations."""
    decode_priority = options.decode_priority if options.HasField("decode_priority") else DEFAULT_RETENTION
    bad.within(f"{FIELD}.decode_priority", decode_priority, RETENTION_RANGE)
    decode_seconds = None
    if options.HasField("decode_duration"):
        field = f"{FIELD}.decode_duration"
        decode_seconds = bad.duration(field, options.decode_duration, limits.retention_time)
    return Retention(_ranges(options.prompt_retention, limits, bad), decode_priority, decode_seconds)


def _ranges(messages: Sequence[pb.TokenRangeRetention], limits: Limits, bad: Violations) -> tuple[TokenRange, ...]:
    field = f"{FIELD}.prompt_retention"
    if not bad.at_most(field, len(messages), limits.retention_ranges, "ranges"):
        return ()
    parts = [_range(f"{field}[{i}]", message, limits, bad) for i, message in enumerate(messages)]
    parts.sort(key=lambda part: part.start)
    for first, second in pairwise(parts):
        if first.end is None or first.end > second.start:
            end = "the end of the prompt" if first.end is None else first.end
            problem = f"is {second.start}, inside {first.field}, which ranges from {first.start} to {end}"
            bad.add(f"{second.field}.start", problem, reason=Reason.CONFLICT)
    return tuple(parts)


def _range(field: str, part: pb.TokenRangeRetention, limits: Limits, bad: Violations) -> TokenRange:
    end = part.end if part.HasField("end") else None
    if end is not None and end <= part.start:
        bad.add(
            f"{field}.end", f"is {end}, must be greater than start, which is {part.start}", reason=Reason.OUT_OF_RANGE
        )
    bad.within(f"{field}.priority", part.priority, RETENTION_RANGE)
    limit = limits.retention_time
    seconds = bad.duration(f"{field}.duration", part.duration, limit) if part.HasField("duration") else None
    return TokenRange(field, part.start, end, part.priority, seconds)
