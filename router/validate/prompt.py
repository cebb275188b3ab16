"""A prompt in one of its three forms (text, token ids, chat), and how long its KV cache blocks are worth keeping."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from google.protobuf import struct_pb2

from router.errors import Range, Violations, shown
from router.validate.model import Limits, Model
from router.validate.tables import ADAPTER_FIELD, TABLE_FIELD, GivenTable
from sluice.ring.params import DEFAULT_RETENTION, RangeRetention, RetentionParams
from sluice.v1 import generation_pb2 as pb

ROLES = ("system", "user", "assistant", "tool")
RESERVED_VARIABLES = frozenset({"messages", "tools", "continue_final_message"})
KV_FIELD = "spec.kv_cache"
RETENTION_RANGE = Range(0, 100)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    size: int
    """Bytes."""
    add_special_tokens: bool
    field: str = "spec.text"


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Every id is in the vocabulary, or behind it that of a row of the request's table."""

    ids: tuple[int, ...]
    field: str = "spec.token_ids"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[dict[str, str], ...]
    size: int
    """Bytes of the whole message."""
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    continue_final_message: bool
    add_generation_prompt: bool
    add_special_tokens: bool
    field: str = "spec.chat"


NO_CHAT = ChatPrompt((), 0, None, {}, False, False, False)
Prompt = TextPrompt | IdsPrompt | ChatPrompt


def parse_prompt(
    spec: pb.GenerationSpec, model: Model, limits: Limits, bad: Violations, table: GivenTable | None = None
) -> Prompt:
    """The result is meaningless if `bad` has violations."""
    kind = spec.WhichOneof("prompt")
    if kind == "token_ids":
        return _ids(spec, table, model, limits, bad)
    if kind == "prompt_embeds":
        return _rows(spec, table, model, bad)
    if kind == "chat":
        return _chat(spec, model, limits, bad)
    if kind is None:
        bad.add("spec.prompt", "is unset: give text, token_ids, chat or prompt_embeds")
    size = len(spec.text.encode())
    bad.at_most("spec.text", size, limits.prompt_bytes, "bytes")
    return TextPrompt(spec.text, size, spec.add_special_tokens if spec.HasField("add_special_tokens") else True)


def _ids(spec: pb.GenerationSpec, table: GivenTable | None, model: Model, limits: Limits, bad: Violations) -> IdsPrompt:
    field = "spec.token_ids.ids"
    ids: tuple[int, ...] = ()
    if not spec.token_ids.ids:
        bad.add(field, "is empty: a prompt has at least one token")
    # Checked before the copy: copying millions of ids would block the event loop.
    elif bad.at_most(field, len(spec.token_ids.ids), limits.prompt_ids, "ids"):
        ids = tuple(spec.token_ids.ids)
        if table is not None:
            _check_virtual(field, ids, table, model.vocab_size, bad)
        else:
            bad.token_ids(field, ids, model.vocab_size)
    _check_unchanged(spec, "token ids", bad)
    return IdsPrompt(ids)


def _check_virtual(field: str, ids: tuple[int, ...], table: GivenTable, vocab_size: int, bad: Violations) -> None:
    largest, source = max(ids), ADAPTER_FIELD if table.version else TABLE_FIELD
    if largest >= vocab_size + table.rows:
        found = f"is {largest}, the vocabulary has {vocab_size} tokens and {source} {table.rows} rows"
        bad.add(f"{field}[{ids.index(largest)}]", found)
    elif largest < vocab_size:
        bad.add(field, f"has no row of {source}: {vocab_size} is row 0, and so on")


def _rows(spec: pb.GenerationSpec, table: GivenTable | None, model: Model, bad: Violations) -> IdsPrompt:
    _check_unchanged(spec, "embeddings", bad)
    rows = 0 if table is None else table.rows
    return IdsPrompt(tuple(range(model.vocab_size, model.vocab_size + rows)), "spec.prompt_embeds")


def _check_unchanged(spec: pb.GenerationSpec, what: str, bad: Violations) -> None:
    if spec.HasField("add_special_tokens") and spec.add_special_tokens:
        bad.add("spec.add_special_tokens", f"is true, but {what} are used unchanged: it applies to text and chat")


def _chat(spec: pb.GenerationSpec, model: Model, limits: Limits, bad: Violations) -> ChatPrompt:
    chat = spec.chat
    if not model.has_chat:
        bad.add("spec.chat", f"the model {model.name} has no chat template")
    size = chat.ByteSize()
    # Checked before conversion: millions of empty messages, a few bytes each, would fill the memory as objects.
    if not (
        bad.at_most("spec.chat", size, limits.prompt_bytes, "bytes")
        and bad.at_most("spec.chat.messages", len(chat.messages), limits.messages, "messages")
    ):
        return NO_CHAT
    _check_messages(chat, bad)
    variables = _variables(chat.template_kwargs)
    for name in sorted(RESERVED_VARIABLES & variables.keys()):
        bad.add(f"spec.chat.template_kwargs.{name}", "is set by the server")
    return ChatPrompt(
        messages=tuple(_message(message) for message in chat.messages),
        size=size,
        tools=_tools(chat.tools_json, bad),
        variables=variables,
        continue_final_message=chat.continue_final_message,
        add_generation_prompt=_add_generation_prompt(chat, variables, bad),
        add_special_tokens=spec.add_special_tokens,
    )


def _check_messages(chat: pb.ChatPrompt, bad: Violations) -> None:
    if not chat.messages:
        bad.add("spec.chat.messages", "is empty: a chat has at least one message")
    for i, message in enumerate(chat.messages):
        field = f"spec.chat.messages[{i}]"
        if message.role not in ROLES:
            bad.add(f"{field}.role", f"is {shown(message.role)}, must be one of {', '.join(ROLES)}", private=True)
        if message.tool_call_id and message.role != "tool":
            problem = f"is set, but the role is {shown(message.role)}, not tool"
            bad.add(f"{field}.tool_call_id", problem, private=True)


def _message(message: pb.ChatMessage) -> dict[str, str]:
    found = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _tools(text: str, bad: Violations) -> list[dict[str, Any]] | None:
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        bad.add("spec.chat.tools_json", f"is not valid JSON: {shown(str(error))}", private=True)
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        bad.add("spec.chat.tools_json", "must be a JSON array of objects")
        return None
    return found or None


def _add_generation_prompt(chat: pb.ChatPrompt, variables: dict[str, Any], bad: Violations) -> bool:
    """True by default, unless the last message is continued; a template variable of that name overrides it."""
    wanted = variables.pop("add_generation_prompt", not chat.continue_final_message)
    if not isinstance(wanted, bool):
        field = "spec.chat.template_kwargs.add_generation_prompt"
        bad.add(field, f"is {shown(wanted)}, must be true or false", private=True)
        return False
    if wanted and chat.continue_final_message:
        bad.add("spec.chat.continue_final_message", "cannot be combined with add_generation_prompt")
    return bool(wanted)


def _variables(struct: struct_pb2.Struct) -> dict[str, Any]:
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    """As json.loads would return it: a whole number is an int, which templates print without a decimal point."""
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return _variables(value.struct_value)
    if kind == "list_value":
        return [_plain(item) for item in value.list_value.values]
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    if kind == "null_value" or kind is None:
        return None
    return getattr(value, kind)


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
        moved = [
            RangeRetention(max(0, part.start - cut), (part.end or prompt_tokens) - cut, part.priority, part.seconds)
            for part in self.prompt
        ]
        return RetentionParams(tuple(part for part in moved if part.end > 0), self.decode_priority, self.decode_seconds)


def parse_retention(options: pb.KvCacheOptions, limits: Limits, bad: Violations) -> Retention:
    """The result is meaningless if `bad` has violations."""
    decode_priority = options.decode_priority if options.HasField("decode_priority") else DEFAULT_RETENTION
    bad.within(f"{KV_FIELD}.decode_priority", decode_priority, RETENTION_RANGE)
    decode_seconds = None
    if options.HasField("decode_duration"):
        field = f"{KV_FIELD}.decode_duration"
        decode_seconds = bad.duration(field, options.decode_duration, limits.retention_time)
    return Retention(_ranges(options.prompt_retention, limits, bad), decode_priority, decode_seconds)


def _ranges(given: Sequence[pb.TokenRangeRetention], limits: Limits, bad: Violations) -> tuple[TokenRange, ...]:
    field = f"{KV_FIELD}.prompt_retention"
    if not bad.at_most(field, len(given), limits.retention_ranges, "ranges"):
        return ()
    parts = [_range(f"{field}[{i}]", part, limits, bad) for i, part in enumerate(given)]
    parts.sort(key=lambda part: part.start)
    for one, other in pairwise(parts):
        if one.end is None or one.end > other.start:
            end = "the end of the prompt" if one.end is None else one.end
            problem = f"is {other.start}, inside {one.field}, which goes from {one.start} to {end}"
            bad.add(f"{other.field}.start", problem)
    return tuple(parts)


def _range(field: str, part: pb.TokenRangeRetention, limits: Limits, bad: Violations) -> TokenRange:
    end = part.end if part.HasField("end") else None
    if end is not None and end <= part.start:
        bad.add(f"{field}.end", f"is {end}, must be greater than start, which is {part.start}")
    bad.within(f"{field}.priority", part.priority, RETENTION_RANGE)
    limit = limits.retention_time
    keep = bad.duration(f"{field}.duration", part.duration, limit) if part.HasField("duration") else None
    return TokenRange(field, part.start, end, part.priority, keep)
