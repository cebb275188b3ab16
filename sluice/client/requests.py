"""Builds request messages. Each option sets the field of that name, in the first message of PARTS that has it."""

import json
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from datetime import timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message as ProtoMessage
from google.protobuf.struct_pb2 import Struct

from sluice.client.errors import InvalidRequest, Violation
from sluice.client.options import OPTION_NAMES, TOKENIZE_OPTION_NAMES, Message, Prompt
from sluice.client.refused_values import must_be, refused_value
from sluice.client.values import as_ids, embeddings_of, guide_fields, is_array, pack_draft_logits
from sluice.settings.names import check_options
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import GuidedDecoding

PARTS = ("sampling", "stopping", "output", "chat", "")
"""Sub-messages of the spec with options, in search order; "" is the spec itself."""
MAX_STRUCT_DEPTH = 30
"""Nesting of template_kwargs. The router refuses more, and protobuf cannot decode much more."""
CHAT_OPTIONS = ("tools_json", "template_kwargs", "continue_final_message")
"""Options of `tokenize` that set a field of the chat."""
OTHER_LIBRARIES = {
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words"), "'stop'"),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_output_tokens"), "'max_tokens'"),
    **dict.fromkeys(("response_format", "structured_outputs"), "guided={'json_schema': ...}"),
    **dict.fromkeys(("num_beams", "use_beam_search"), "beam_search={'width': ...}"),
    "top_logprobs": "'logprobs'",
    "num_return_sequences": "'n'",
    "tools": "tools_json=json.dumps(tools)",
}
"""What to write in place of options of other libraries whose names are not close to the right ones."""


def set_engine_deaths(request: ProtoMessage, engine_deaths: int) -> None:
    # Only generations kill engines. StreamState sets the count of a stream.
    if engine_deaths and isinstance(request, pb.GenerateRequest):
        request.spec.engine_deaths = engine_deaths


def tokenize_request(text: str | Sequence[Message], options: Mapping[str, Any]) -> pb.TokenizeRequest:
    """Raises TypeError for an option that is unknown or not for texts, InvalidRequest for an unencodable value."""
    check_options(options, TOKENIZE_OPTION_NAMES)
    request = pb.TokenizeRequest()
    set_options = {name: value for name, value in options.items() if value is not None}
    chat_options = [name for name in set_options if name in CHAT_OPTIONS]
    if isinstance(text, str):
        if chat_options:
            raise TypeError(f"{', '.join(chat_options)}: for chats only, not for a text")
        _assign(request, "text", text, "text")
    else:
        _assign(request, "chat", {"messages": list(map(_message, text))}, "chat")
    for name, value in set_options.items():
        if name in CHAT_OPTIONS:
            _assign(request.chat, name, value, f"chat.{name}")
        else:
            _assign(request, name, value, name)
    return request


def detokenize_request(token_ids: Sequence[int], model: str, skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """Raises InvalidRequest for ids that are negative or exceed 32 bits, TypeError for others that are no integers."""
    request = pb.DetokenizeRequest(model=model, skip_special_tokens=skip_special_tokens)
    _assign(request, "token_ids", as_ids("token_ids", token_ids), "token_ids")
    return request


def build_spec(prompt: Prompt, options: Mapping[str, Any]) -> pb.GenerationSpec:
    """Raises TypeError for an unknown option or a value of the wrong type, InvalidRequest for an unencodable value."""
    # The names of keys are only read for an error: they take longer to find than a request to build.
    if not options.keys() <= OPTION_NAMES:
        check_options(options, OPTION_NAMES, _keys_of_options() | OTHER_LIBRARIES)
    spec = pb.GenerationSpec()
    _set_prompt(spec, prompt)
    for name, value in options.items():
        if value is not None:
            _set_option(spec, name, value)
    return spec


def _keys_of_options() -> dict[str, str]:
    """Keys of options that are mappings: "json_schema" is in "guided={'json_schema': ...}"."""
    kinds = {name: _option_type(name) for name in sorted(OPTION_NAMES, reverse=True)}
    return {
        key: f"{name}={{{key!r}: ...}}"
        for name, kind in kinds.items()
        if kind is not None
        for key in kind.fields_by_name
    }


def _option_type(name: str) -> Any:
    """The message type of an option's field; None if it is not a message."""
    fields = (_part_type(part).fields_by_name.get(name) for part in PARTS)
    return next((field.message_type for field in fields if field is not None), None)


def _set_prompt(spec: pb.GenerationSpec, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _assign(spec, "text", prompt, "spec.text")
        return
    if isinstance(prompt, Mapping) and prompt.keys() == {"prompt_embeds"}:
        _assign(spec, "prompt_embeds", embeddings_of(prompt["prompt_embeds"]), "spec.prompt_embeds")
        return
    if is_array(prompt):
        _assign(spec, "token_ids", {"ids": as_ids("spec.token_ids", prompt)}, "spec.token_ids")
        return
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Sequence):
        kinds = "text, token ids, chat messages or a mapping with prompt_embeds"
        raise TypeError(f"a prompt must be {kinds}, not {type(prompt).__name__}")
    if prompt and isinstance(prompt[0], Mapping):
        _assign(spec, "chat", {"messages": list(map(_message, prompt))}, "spec.chat")
    elif prompt and (isinstance(prompt[0], Sequence) or is_array(prompt[0])):
        several = (
            "sluice.executor.GenerationExecutor.generate takes a list of prompts, AsyncClient runs calls concurrently"
        )
        raise TypeError(f"a call takes one prompt (got a list of {len(prompt)}); {several}")
    else:
        _assign(spec, "token_ids", {"ids": list(prompt)}, "spec.token_ids")


def _message(message: Any) -> Any:
    """The fields of sluice.v1.ChatMessage, which has a list of parts in `parts` and its own form of tool calls."""
    if not isinstance(message, Mapping):
        return message
    fields = dict(message)
    if isinstance(fields.get("content"), list | tuple):
        fields["parts"] = [_part(part) for part in fields.pop("content")]
    if isinstance(fields.get("tool_calls"), list | tuple):
        fields["tool_calls"] = [_call(call) for call in fields["tool_calls"]]
    return fields


def _call(call: Any) -> Any:
    match call:
        case {"function": {"name": name, "arguments": arguments}, **others} if others.keys() <= {"id", "type"}:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            return {"id": others.get("id"), "name": name, "arguments_json": text}
    return call


def _part(part: Any) -> Mapping[str, Any]:
    match part:
        case {"type": "text", "text": text, **others} if not others:
            return {"text": text}
        case {"type": "image", "data": data, **others} if not others:
            return {"image": {"data": data}}
    wrong = f"a mapping with {', '.join(map(str, part))}" if isinstance(part, Mapping) else type(part).__name__
    forms = '{"type": "text", "text": ...} or {"type": "image", "data": ...}'
    raise TypeError(f"spec.chat.messages: a part must be {forms}, not {wrong}")


def _set_option(spec: pb.GenerationSpec, name: str, value: Any) -> None:
    part = next(part for part in PARTS if name in _part_type(part).fields_by_name)
    if part == "chat" and spec.WhichOneof("prompt") != "chat":
        raise TypeError(f"{name!r} is an option of chat prompts only")
    if name == "prompt_table":
        value = _table(value)
    if name == "images":
        value = _images(value)
    message = getattr(spec, part) if part else spec
    _assign(message, name, value, f"spec.{part}.{name}" if part else f"spec.{name}")


def _images(value: Any) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(must_be("spec.images", "a list of bytes, one value for each image", value))
    return [{"data": data} for data in value]


def _table(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping) and "embeddings" in value:
        return {**value, "embeddings": embeddings_of(value["embeddings"])}
    return {"embeddings": embeddings_of(value)}


def _part_type(part: str) -> Any:
    return pb.GenerationSpec.DESCRIPTOR.fields_by_name[part].message_type if part else pb.GenerationSpec.DESCRIPTOR


def _assign(message: ProtoMessage, name: str, value: Any, path: str) -> None:
    field = message.DESCRIPTOR.fields_by_name[name]
    # A string is a sequence of strings: without this, each of its letters would become a stop string.
    if isinstance(value, str) and isinstance(getattr(message, name), MutableSequence):
        value = [value]
    try:
        converted = _convert(field, value)
    except TypeError as error:
        raise TypeError(f"{path}: {error}") from error
    except (ValueError, OverflowError) as error:
        raise _invalid(path, error) from error
    try:
        message.MergeFrom(type(message)(**{name: converted}))
    except TypeError as error:
        raise TypeError(refused_value(field, converted, path) or f"{path}: {error}") from error
    except (ValueError, OverflowError) as error:
        raise _invalid(path, error) from error


def _invalid(path: str, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{path}: {error}", violations=(Violation(path, str(error)),))


def _convert(field: Any, value: Any) -> Any:
    """The value in protobuf's form, also inside mappings: enums by full name, durations as timedelta."""
    kind = field.message_type
    if kind is None and field.is_repeated and hasattr(value, "tolist"):
        # Of an array or tensor, protobuf's errors name no place.
        return value.tolist()
    if field.enum_type is not None:
        return f"{field.enum_type.name}_{value}".upper()
    if kind is Duration.DESCRIPTOR:
        return _duration(field.name, value)
    if kind is Struct.DESCRIPTOR and _is_deeper(value, MAX_STRUCT_DEPTH):
        raise ValueError(f"is nested more than {MAX_STRUCT_DEPTH} levels deep")
    if kind is pb.DraftLogits.DESCRIPTOR:
        return pack_draft_logits(value)
    if kind is GuidedDecoding.DESCRIPTOR:
        return guide_fields(value)
    if kind is None or kind.file is not pb.DESCRIPTOR or kind.GetOptions().map_entry:
        return value
    if not field.is_repeated:
        return _convert_fields(kind, value)
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        # Protobuf refuses it.
        return value
    return [_convert_fields(kind, item) for item in value]


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether mappings and sequences are nested more than `levels` deep."""
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)


def _duration(name: str, value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, int | float):
        return timedelta(seconds=value)
    raise TypeError(must_be(name, "a number of seconds or a timedelta", value))


def _convert_fields(kind: Any, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    fields = kind.fields_by_name
    # Unknown names are kept, so that protobuf raises for them.
    return {
        name: _convert(fields[name], item) if name in fields else item
        for name, item in value.items()
        if item is not None
    }
