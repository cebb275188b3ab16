"""Chat prompts: messages with text, images and tool calls; tools; variables of the template."""

import json
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf import struct_pb2

from router.errors import Reason, Violations, shown
from router.parse.model import Limits, ServedModel
from sluice.v1 import generation_pb2 as pb

ROLES = ("system", "user", "assistant", "tool")
ONLY_OF = {"tool_call_id": "tool", "tool_calls": "assistant", "reasoning_content": "assistant"}
"""Message fields that only one role may have, with that role."""
MAX_PARTS = 256
"""Parts per message."""
MAX_CALLS = 4096
"""Tool calls in all messages together."""
MAX_DEPTH = 64
"""Nesting of JSON values."""
MAX_VARIABLES_DEPTH = 30
"""Nesting of template_kwargs. A little less than protobuf can decode: it stops at 100 nested messages, and each object
of a Struct takes three. Beyond that, the error could not name the field."""
RESERVED_VARIABLES = frozenset({"messages", "tools", "continue_final_message"})


JSON_NAMES: dict[type, str] = {dict: "object", list: "array of objects"}

T = TypeVar("T")


class CutJson(str):
    """JSON that was cut short and so has no value. Templates show it as it is; their filter `tojson` does not quote
    it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[dict[str, Any], ...]
    """As passed to templates. If a message has parts, its content is a list."""
    size: int
    """Bytes of the whole chat, without images."""
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    continue_final_message: bool
    add_generation_prompt: bool
    add_special_tokens: bool
    largest_field: str = "spec.chat.messages"
    """The field with the most bytes, for errors about the size of the rendered text."""
    field: str = "spec.chat"

    @property
    def has_calls(self) -> bool:
        return any("tool_calls" in message for message in self.messages)


NO_CHAT = ChatPrompt((), 0, None, {}, False, False, False)


def parse_chat(spec: pb.GenerationSpec, model: ServedModel, limits: Limits, bad: Violations) -> ChatPrompt:
    chat = spec.chat
    if not model.has_chat:
        bad.add("spec.chat", f"the model {model.name} has no chat template", reason=Reason.NOT_SUPPORTED)
    # Check before converting: millions of empty messages, a few bytes each, would fill the memory as Python objects.
    few_messages = bad.at_most("spec.chat.messages", len(chat.messages), limits.messages, "messages")
    if not (few_messages and _within_limits(chat, bad)):
        return NO_CHAT
    size = chat.ByteSize() - sum(len(part.image.data) for message in chat.messages for part in message.parts)
    if not bad.at_most("spec.chat", size, limits.prompt_bytes, "bytes"):
        return NO_CHAT
    _check_messages(chat, bad)
    messages = tuple(_message(message, f"spec.chat.messages[{i}]", bad) for i, message in enumerate(chat.messages))
    variables = _variables(chat.template_kwargs)
    _check_depth("spec.chat.template_kwargs", variables, MAX_VARIABLES_DEPTH, bad)
    for name in sorted(RESERVED_VARIABLES & variables.keys()):
        bad.add(f"spec.chat.template_kwargs.{name}", "is set by the server", reason=Reason.CONFLICT)
    return ChatPrompt(
        messages=messages,
        size=size,
        tools=_tools(chat.tools_json, bad),
        variables=variables,
        continue_final_message=chat.continue_final_message,
        add_generation_prompt=_add_generation_prompt(chat, variables, bad),
        add_special_tokens=spec.add_special_tokens,
        largest_field=_largest_field(chat, size),
    )


def _largest_field(chat: pb.ChatPrompt, size: int) -> str:
    tools, variables = len(chat.tools_json), chat.template_kwargs.ByteSize()
    messages = size - tools - variables
    names = ("messages", "tools_json", "template_kwargs")
    return f"spec.chat.{max(zip((messages, tools, variables), names, strict=True))[1]}"


def _within_limits(chat: pb.ChatPrompt, bad: Violations) -> bool:
    calls = sum(len(message.tool_calls) for message in chat.messages)
    return bad.at_most("spec.chat.messages", calls, MAX_CALLS, "tool calls") and all(
        bad.at_most(f"spec.chat.messages[{i}].parts", len(message.parts), MAX_PARTS, "parts")
        for i, message in enumerate(chat.messages)
    )


def _check_messages(chat: pb.ChatPrompt, bad: Violations) -> None:
    if not chat.messages:
        bad.add("spec.chat.messages", "is empty, must have at least one message", reason=Reason.MISSING)
    for i, message in enumerate(chat.messages):
        field = f"spec.chat.messages[{i}]"
        if message.role not in ROLES:
            bad.add(
                f"{field}.role",
                f"is {shown(message.role)}, must be one of {', '.join(ROLES)}",
                private=True,
                reason=Reason.UNKNOWN_VALUE,
            )
        for name, role in ONLY_OF.items():
            if getattr(message, name) and message.role != role:
                problem = f"is set, but the role is {shown(message.role)}, not {role}"
                bad.add(f"{field}.{name}", problem, private=True, reason=Reason.CONFLICT)
        if message.parts and message.content:
            bad.add(f"{field}.parts", "cannot be combined with content", reason=Reason.CONFLICT)
        for j, part in enumerate(message.parts):
            if part.WhichOneof("part") is None:
                bad.add(f"{field}.parts[{j}]", "is unset: set text or image", reason=Reason.MISSING)


def _message(message: pb.ChatMessage, field: str, bad: Violations) -> dict[str, Any]:
    converted: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        converted["content"] = list(map(_part, message.parts))
    for name in ("tool_call_id", "reasoning_content", "name"):
        if value := getattr(message, name):
            converted[name] = value
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        converted["tool_calls"] = [_tool_call(call, f"{field}.tool_calls[{i}]", bad) for i, call in calls]
    return converted


def _tool_call(call: pb.ToolCall, field: str, bad: Violations) -> dict[str, Any]:
    """The call as chat templates expect it: the arguments are an object, not JSON text."""
    if not call.name:
        bad.add(f"{field}.name", "is empty", reason=Reason.MISSING)
    arguments = _arguments(call.arguments_json, f"{field}.arguments_json", bad)
    converted = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return converted | ({"id": call.id} if call.id else {})


def _arguments(text: str, field: str, bad: Violations) -> Any:
    """The decoded object. If its JSON is not valid, the text: the output that contained the call was cut short."""
    try:
        return _json_value(text or "{}", dict, field, bad)
    except ValueError as error:
        if text.lstrip().startswith("{"):
            return CutJson(text)
        bad.add(field, _not_json(error), private=True, reason=Reason.INVALID_FORMAT)
        return None


def _part(part: pb.ContentPart) -> dict[str, str]:
    return {"type": "text", "text": part.text} if part.WhichOneof("part") == "text" else {"type": "image"}


def _tools(text: str, bad: Violations) -> list[dict[str, Any]] | None:
    field = "spec.chat.tools_json"
    if not text:
        return None
    try:
        tools = _json_value(text, list, field, bad)
    except ValueError as error:
        bad.add(field, _not_json(error), private=True, reason=Reason.INVALID_FORMAT)
        return None
    if tools is not None and not all(isinstance(tool, dict) for tool in tools):
        bad.add(field, "must be a JSON array of objects", reason=Reason.INVALID_FORMAT)
        return None
    return tools or None


def _json_value(text: str, kind: type[T], field: str, bad: Violations) -> T | None:
    """The decoded value; None, with a violation added to `bad`, if it is of another kind or nested too deeply.

    Raises ValueError if the text is not valid JSON.
    """
    try:
        value: Any = json.loads(text)
    except RecursionError:
        value = None
    else:
        if not isinstance(value, kind):
            bad.add(field, f"must be a JSON {JSON_NAMES[kind]}", reason=Reason.INVALID_FORMAT)
            return None
    if not _check_depth(field, value, MAX_DEPTH, bad):
        return None
    checked: T = value
    return checked


def _check_depth(field: str, value: Any, levels: int, bad: Violations) -> bool:
    """`value`: None if it is nested too deeply to be decoded."""
    if value is None or _is_deeper(value, levels):
        bad.add(field, f"is nested more than {levels} levels deep", reason=Reason.TOO_MANY)
        return False
    return True


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether JSON values are nested more than `levels` deep. Not recursive, because the limit may be in the thousands
    for text that the decoder accepts."""
    inner = [value]
    for _ in range(levels):
        containers = [each for each in inner if isinstance(each, dict | list)]
        if not containers:
            return False
        inner = [item for each in containers for item in (each.values() if isinstance(each, dict) else each)]
    return any(isinstance(each, dict | list) for each in inner)


def _not_json(error: ValueError) -> str:
    return f"is not valid JSON: {shown(str(error))}"


def _add_generation_prompt(chat: pb.ChatPrompt, variables: dict[str, Any], bad: Violations) -> bool:
    """True by default, unless the final message is continued. A template variable of the same name overrides it."""
    value = variables.pop("add_generation_prompt", not chat.continue_final_message)
    if not isinstance(value, bool):
        field = "spec.chat.template_kwargs.add_generation_prompt"
        bad.add(field, f"is {shown(value)}, must be true or false", private=True, reason=Reason.INVALID_FORMAT)
        return False
    if value and chat.continue_final_message:
        bad.add(
            "spec.chat.continue_final_message", "cannot be combined with add_generation_prompt", reason=Reason.CONFLICT
        )
    return bool(value)


def _variables(struct: struct_pb2.Struct) -> dict[str, Any]:
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    """The value as json.loads would return it: whole numbers are int, which templates print without a decimal point."""
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
