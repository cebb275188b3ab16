"""The prompt as text, token ids, chat or embeddings; and the retention of its KV cache blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from router.errors import Reason, Violations
from router.parse.chat import ChatPrompt, parse_chat
from router.parse.model import Limits, ServedModel
from sluice.v1 import generation_pb2 as pb
from sluice.wire.params import DEFAULT_RETENTION, RangeRetention, RetentionParams
from sluice.wire.sampling_ranges import Range

KV_FIELD = "spec.kv_cache"
RETENTION_RANGE = Range(0, 100)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    size: int
    """Length of the text in bytes."""
    add_special_tokens: bool
    field: str = "spec.text"


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Every id is in the vocabulary or, beyond it, is the id of a row, see `router.features.tables`."""

    ids: tuple[int, ...]
    field: str = "spec.token_ids"


Prompt = TextPrompt | IdsPrompt | ChatPrompt


def parse_prompt(spec: pb.GenerationSpec, model: ServedModel, limits: Limits, bad: Violations) -> Prompt:
    """The result must not be used if `bad` has violations."""
    kind = spec.WhichOneof("prompt")
    if kind == "token_ids":
        return _ids(spec, model, limits, bad)
    if kind == "prompt_embeds":
        _check_unchanged(spec, "embeddings", bad)
        # The ids of the rows are added to it.
        return IdsPrompt((), "spec.prompt_embeds")
    if kind == "chat":
        return parse_chat(spec, model, limits, bad)
    if kind is None:
        bad.add("spec.prompt", "is unset: set text, token_ids, chat or prompt_embeds", reason=Reason.MISSING)
    size = len(spec.text.encode())
    bad.at_most("spec.text", size, limits.prompt_bytes, "bytes")
    return TextPrompt(spec.text, size, spec.add_special_tokens if spec.HasField("add_special_tokens") else True)


def _ids(spec: pb.GenerationSpec, model: ServedModel, limits: Limits, bad: Violations) -> IdsPrompt:
    field = "spec.token_ids.ids"
    ids: tuple[int, ...] = ()
    if not spec.token_ids.ids:
        bad.add(field, "is empty, must have at least one token", reason=Reason.MISSING)
    # Check before copying: copying millions of ids would block the event loop.
    elif bad.at_most(field, len(spec.token_ids.ids), limits.prompt_ids, "ids"):
        ids = tuple(spec.token_ids.ids)
        # Ids of rows are beyond the vocabulary: the tables' feature checks them.
        if not (spec.HasField("prompt_table") or spec.prompt_adapter_id):
            bad.token_ids(field, ids, model.vocab_size)
    _check_unchanged(spec, "token ids", bad)
    return IdsPrompt(ids)


def _check_unchanged(spec: pb.GenerationSpec, what: str, bad: Violations) -> None:
    if spec.HasField("add_special_tokens") and spec.add_special_tokens:
        bad.add(
            "spec.add_special_tokens",
            f"is true, but applies only to text and chat: {what} are used unchanged",
            reason=Reason.CONFLICT,
        )


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
class Retention:
    """Retention priorities as requested, before the prompt's length is known."""

    prompt: tuple[TokenRange, ...]
    """Sorted, without overlaps."""
    decode_priority: int
    decode_seconds: float | None

    def params(self, prompt_tokens: int, kept_tokens: int) -> RetentionParams:
        """The parameters for a prompt of `prompt_tokens` tokens that is truncated to its last `kept_tokens`.

        Raises RequestError INVALID_ARGUMENT for a range beyond the prompt.
        """
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
    bad.within(f"{KV_FIELD}.decode_priority", decode_priority, RETENTION_RANGE)
    decode_seconds = None
    if options.HasField("decode_duration"):
        field = f"{KV_FIELD}.decode_duration"
        decode_seconds = bad.duration(field, options.decode_duration, limits.retention_time)
    return Retention(_ranges(options.prompt_retention, limits, bad), decode_priority, decode_seconds)


def _ranges(messages: Sequence[pb.TokenRangeRetention], limits: Limits, bad: Violations) -> tuple[TokenRange, ...]:
    field = f"{KV_FIELD}.prompt_retention"
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
