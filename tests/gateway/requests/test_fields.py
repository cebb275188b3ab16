"""The handling of each field in docs/http.md agrees with the parsers and with OpenAI's client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import msgspec
import openai.types
import openai.types.chat
import pytest
from msgspec.inspect import StructType, type_info
from typing_extensions import is_typeddict

from gateway.requests import chat, completion
from gateway.requests.body import NEUTRAL

PAGE = Path(__file__).parents[3] / "docs/http.md"
ROW = re.compile(r"^\| (`[^|]+`) \| (yes|refused|ignored) \| (?:(yes|refused|ignored) \|)?", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")
USER = [{"role": "user", "content": "hi"}]
PATHS = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": USER}}
CLIENT = {
    "/v1/completions": openai.types.completion_create_params,
    "/v1/chat/completions": openai.types.chat.completion_create_params,
}


def documented() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """How fields are handled, by name: of completions, of chats, and nested ones."""
    handling: tuple[dict[str, str], dict[str, str], dict[str, str]] = ({}, {}, {})
    for names, first, second in ROW.findall(PAGE.read_text()):
        for name in NAME.findall(names):
            columns = zip(handling[:2], (first, second), strict=True) if second else [(handling[2], first)]
            for column, fate in columns:
                assert name not in column, f"{name} is listed twice"
                column[name] = fate
    return handling


COMPLETIONS, CHATS, INSIDE = documented()
DOCUMENTED = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHATS}


@pytest.mark.parametrize(
    ("listed", "kind", "module"),
    [(COMPLETIONS, completion.CompletionRequest, completion), (CHATS, chat.ChatRequest, chat)],
)
def test_the_documentation_agrees_with_the_parsers(listed: dict[str, str], kind: type, module: ModuleType):
    expected = dict.fromkeys(module.REFUSED, "refused") | dict.fromkeys(module.WITHOUT_MEANING, "ignored")
    read_fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    assert not expected.keys() & set(read_fields)
    assert listed == expected | dict.fromkeys(read_fields, "yes")


def client_fields(path: str) -> dict[str, Any]:
    """Types by name of the fields that OpenAI's client can send."""
    types: dict[str, Any] = {}
    for kind in get_args(CLIENT[path].CompletionCreateParams):
        types |= get_type_hints(kind)
    return types


@pytest.mark.parametrize("path", PATHS)
def test_every_field_of_the_client_is_known(path: str):
    """A new version of the client may have new fields, which must be supported, refused or ignored."""
    assert client_fields(path).keys() - DOCUMENTED[path].keys() == set()


def inside(kind: Any, path: str) -> Iterator[str]:
    """Paths of all fields that a value of this client type may contain."""
    for struct in [kind] if is_typeddict(kind) else []:
        for name, hint in get_type_hints(struct).items():
            yield f"{path}.{name}"
            if f"{path}.{name}" not in INSIDE:
                yield from inside(hint, f"{path}.{name}")
    for argument in get_args(kind):
        yield from inside(argument, path)


def decoded(kind: Any, path: str) -> Iterator[str]:
    """Paths of all fields that the gateway reads from a value of this type."""
    if isinstance(kind, StructType):
        yield f"{path}.{kind.tag_field}"
        for field in kind.fields:
            yield f"{path}.{field.encode_name}"
            yield from decoded(field.type, f"{path}.{field.encode_name}")
    for inner in (getattr(kind, "item_type", None), *getattr(kind, "types", ())):
        if inner is not None:
            yield from decoded(inner, path)


@pytest.mark.parametrize("path", PATHS)
def test_every_nested_field_is_known(path: str):
    kind = {"/v1/completions": completion.CompletionRequest, "/v1/chat/completions": chat.ChatRequest}[path]
    read = set(decoded(type_info(kind), ""))
    sent = {
        nested_path
        for name, hint in client_fields(path).items()
        if DOCUMENTED[path][name] == "yes"
        for nested_path in inside(hint, name)
    }
    assert sent - INSIDE.keys() - {nested_path.removeprefix(".") for nested_path in read} == set()
    if "messages" in PATHS[path]:
        assert INSIDE.keys() <= sent


def fields(fate: str) -> list[tuple[str, str]]:
    return [
        (path, name) for path, listed in DOCUMENTED.items() for name, field_fate in listed.items() if field_fate == fate
    ]


@pytest.mark.parametrize(("path", "name"), fields("refused"))
async def test_refused_fields_are_named(gateway, script, path, name):
    for value in (True, 2, "x", ["x"], {"x": 1}):
        answer = await gateway.post(path, **PATHS[path] | {name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert not script.seen
    for empty in (None, False, [], {}, "", *map(json.loads, NEUTRAL.get(name, ()))):
        assert (await gateway.post(path, **PATHS[path] | {name: empty})).status_code == 200


@pytest.mark.parametrize(("path", "name"), fields("ignored"))
async def test_ignored_fields_are_not_counted_as_unknown(gateway, script, path, name):
    await gateway.post(path, **PATHS[path], headers={"x-request-id": "r"})
    await gateway.post(path, **PATHS[path] | {name: "x"}, headers={"x-request-id": "r"})
    assert script.seen[0] == script.seen[1]
    assert gateway.gateway.counters.unknown_fields == 0


TEXT = {"type": "text", "text": "hi"}
FUNCTION = {"type": "function", "function": {"name": "f"}}
REFUSED_INSIDE = {
    "messages.audio": ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    "messages.function_call": (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
        "messages[0].function_call",
    ),
    "messages.content.input_audio": (
        {"messages": [{"role": "user", "content": [TEXT, {"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[1]",
    ),
    "messages.content.file": (
        {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}]},
        "messages[0].content[0]",
    ),
    "messages.tool_calls.custom": (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "id": "c", "custom": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].type",
    ),
    "tools.custom": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    "tool_choice.custom": (
        {"tools": [FUNCTION], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        "tool_choice.type",
    ),
    "tool_choice.allowed_tools": (
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.type",
    ),
}


async def test_refused_nested_fields_are_named(gateway, script):
    assert REFUSED_INSIDE.keys() == {name for name, fate in INSIDE.items() if fate == "refused"}
    for name, (body, param) in REFUSED_INSIDE.items():
        answer = await gateway.post("/v1/chat/completions", **PATHS["/v1/chat/completions"] | body)
        assert (name, answer.status_code, answer.json()["error"]["param"]) == (name, 400, param)
    assert not script.seen


async def test_only_the_modality_text_is_supported(gateway):
    assert (await gateway.post("/v1/chat/completions", messages=USER, modalities=["text"])).status_code == 200
    answer = await gateway.post("/v1/chat/completions", messages=USER, modalities=["text", "audio"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "modalities")


def test_the_user_in_the_log():
    logged = [
        chat.ChatRequest(messages=[], user=user, safety_identifier=identifier).logged_user
        for user, identifier in (("ann", "a1"), (None, "a\n1"), (None, None))
    ]
    assert logged == ["ann", "a\\n1", None]


async def test_a_refusal_counts_as_the_models_text(gateway, script):
    refusals = [{"refusal": "No."}, {"content": [TEXT, {"type": "refusal", "refusal": "No."}]}]
    messages = [*USER, *({"role": "assistant", "audio": None, "function_call": None} | refusal for refusal in refusals)]
    answer = await gateway.post("/v1/chat/completions", messages=messages)
    assert answer.status_code == 200, answer.text
    assert [message.content for message in script.seen[-1].spec.chat.messages] == ["hi", "No.", "hi\nNo."]
