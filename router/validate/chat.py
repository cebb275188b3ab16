"""A chat: messages of text and images, tools, variables of the template."""

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import struct_pb2

from router.errors import Reason, Violations, shown
from router.validate.model import Limits, Model
from sluice.v1 import generation_pb2 as pb

ROLES = ("system", "user", "assistant", "tool")
MAX_PARTS = 256
"""Of a message."""
RESERVED_VARIABLES = frozenset({"messages", "tools", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[dict[str, Any], ...]
    """As templates get them: of parts their content is a list."""
    size: int
    """Bytes of the whole message, without images."""
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    continue_final_message: bool
    add_generation_prompt: bool
    add_special_tokens: bool
    field: str = "spec.chat"


NO_CHAT = ChatPrompt((), 0, None, {}, False, False, False)


def parse_chat(spec: pb.GenerationSpec, model: Model, limits: Limits, bad: Violations) -> ChatPrompt:
    chat = spec.chat
    if not model.has_chat:
        bad.add("spec.chat", f"the model {model.name} has no chat template", reason=Reason.NOT_SUPPORTED)
    # Checked before conversion: millions of empty messages, a few bytes each, would fill the memory as objects.
    if not (bad.at_most("spec.chat.messages", len(chat.messages), limits.messages, "messages") and _few(chat, bad)):
        return NO_CHAT
    size = chat.ByteSize() - sum(len(part.image.data) for message in chat.messages for part in message.parts)
    if not bad.at_most("spec.chat", size, limits.prompt_bytes, "bytes"):
        return NO_CHAT
    _check_messages(chat, bad)
    variables = _variables(chat.template_kwargs)
    for name in sorted(RESERVED_VARIABLES & variables.keys()):
        bad.add(f"spec.chat.template_kwargs.{name}", "is set by the server", reason=Reason.CONFLICT)
    return ChatPrompt(
        messages=tuple(_message(message) for message in chat.messages),
        size=size,
        tools=_tools(chat.tools_json, bad),
        variables=variables,
        continue_final_message=chat.continue_final_message,
        add_generation_prompt=_add_generation_prompt(chat, variables, bad),
        add_special_tokens=spec.add_special_tokens,
    )


def _few(chat: pb.ChatPrompt, bad: Violations) -> bool:
    return all(
        bad.at_most(f"spec.chat.messages[{i}].parts", len(message.parts), MAX_PARTS, "parts")
        for i, message in enumerate(chat.messages)
    )


def _check_messages(chat: pb.ChatPrompt, bad: Violations) -> None:
    if not chat.messages:
        bad.add("spec.chat.messages", "is empty: a chat has at least one message", reason=Reason.MISSING)
    for i, message in enumerate(chat.messages):
        field = f"spec.chat.messages[{i}]"
        if message.role not in ROLES:
            bad.add(
                f"{field}.role",
                f"is {shown(message.role)}, must be one of {', '.join(ROLES)}",
                private=True,
                reason=Reason.UNKNOWN_VALUE,
            )
        if message.tool_call_id and message.role != "tool":
            problem = f"is set, but the role is {shown(message.role)}, not tool"
            bad.add(f"{field}.tool_call_id", problem, private=True)
        if message.parts and message.content:
            bad.add(f"{field}.parts", "cannot be combined with content", reason=Reason.CONFLICT)
        for j, part in enumerate(message.parts):
            if part.WhichOneof("part") is None:
                bad.add(f"{field}.parts[{j}]", "is unset: give text or image", reason=Reason.MISSING)


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        found["content"] = list(map(_part, message.parts))
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _part(part: pb.ContentPart) -> dict[str, str]:
    return {"type": "text", "text": part.text} if part.WhichOneof("part") == "text" else {"type": "image"}


def _tools(text: str, bad: Violations) -> list[dict[str, Any]] | None:
    if not text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        bad.add(
            "spec.chat.tools_json",
            f"is not valid JSON: {shown(str(error))}",
            private=True,
            reason=Reason.INVALID_FORMAT,
        )
        return None
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        bad.add("spec.chat.tools_json", "must be a JSON array of objects", reason=Reason.INVALID_FORMAT)
        return None
    return found or None


def _add_generation_prompt(chat: pb.ChatPrompt, variables: dict[str, Any], bad: Violations) -> bool:
    """True by default, unless the last message is continued; a template variable of that name overrides it."""
    wanted = variables.pop("add_generation_prompt", not chat.continue_final_message)
    if not isinstance(wanted, bool):
        field = "spec.chat.template_kwargs.add_generation_prompt"
        bad.add(field, f"is {shown(wanted)}, must be true or false", private=True, reason=Reason.INVALID_FORMAT)
        return False
    if wanted and chat.continue_final_message:
        bad.add(
            "spec.chat.continue_final_message", "cannot be combined with add_generation_prompt", reason=Reason.CONFLICT
        )
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
