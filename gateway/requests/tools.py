"""The tools that a request offers, and `tool_choice`."""

from typing import Literal

import msgspec

from gateway.errors import invalid

MAX_TOOLS = 128


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.Raw()
    strict: bool | None = None


class Tool(msgspec.Struct, tag="function"):
    function: Function


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct, tag="function"):
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def offered_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> list[Tool]:
    """The tools that go into the prompt. Raises ApiError."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("needs tools", "tool_choice")
        return []
    if len(tools) > MAX_TOOLS:
        raise invalid(f"has {len(tools)} tools, at most {MAX_TOOLS} are allowed", "tools")
    return [] if choice == "none" else tools


def required_functions(tools: list[Tool], choice: ToolChoice | None) -> list[Function]:
    """The functions of which one must be called; empty if the model may choose freely. Raises ApiError."""
    if choice == "required":
        return [tool.function for tool in tools]
    if not isinstance(choice, NamedTool):
        return []
    name = choice.function.name
    functions = [tool.function for tool in tools if tool.function.name == name]
    if not functions:
        raise invalid(f"names {name[:64]!r}, which is not among the tools", "tool_choice")
    return functions[:1]
