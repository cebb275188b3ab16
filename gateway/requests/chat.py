"""The body of /v1/chat/completions."""

import base64
import binascii
import re
from typing import Any, Literal

import msgspec

from gateway.errors import invalid
from gateway.requests import common
from gateway.requests.common import Common
from gateway.requests.guides import UNSET_JSON, is_set
from gateway.requests.tools import Tool, ToolChoice

REFUSED = (*common.REFUSED, "prompt", "echo", "best_of", "prompt_logprobs")
WITHOUT_MEANING = common.WITHOUT_MEANING
TEMPLATE_VARIABLES = ("reasoning_effort", "verbosity", "add_generation_prompt")
MAX_MESSAGES = 4096
MAX_DEPTH = 16
"""Maximum nesting of `chat_template_kwargs`."""
DATA_URL = re.compile(r"data:image/[a-z+.-]+;base64,", re.ASCII)
"""The URL's media type does not matter: the ring detects the format from the image itself."""


class ImageUrl(msgspec.Struct):
    url: str


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    """Text in which the model refused to answer."""
    image_url: ImageUrl | None = None

    def for_ring(self, place: str) -> dict[str, Any]:
        """The part in the format of `sluice.client`. Raises ApiError."""
        if self.type == "text" and self.text is not None:
            return {"type": "text", "text": self.text}
        if self.type == "refusal" and self.refusal is not None:
            return {"type": "text", "text": self.refusal}
        if self.type == "image_url" and self.image_url is not None:
            return {"type": "image", "data": _image(self.image_url.url, f"{place}.image_url.url")}
        raise invalid(
            f"has type {self.type[:64]!r}, must be text, refusal or image_url with the field of that name", place
        )


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str = ""


class CalledTool(msgspec.Struct, tag="function"):
    function: CalledFunction
    id: str = ""


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    """Text in which the model refused to answer."""
    audio: msgspec.Raw = UNSET_JSON
    function_call: msgspec.Raw = UNSET_JSON

    def for_ring(self, place: str) -> dict[str, Any]:
        """Raises ApiError."""
        for name in ("audio", "function_call"):
            if is_set(getattr(self, name)):
                raise invalid("is not supported", f"{place}.{name}")
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self._content(f"{place}.content"),
        }
        for name in ("name", "tool_call_id", "reasoning_content"):
            if value := getattr(self, name):
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "name": call.function.name, "arguments_json": call.function.arguments}
                for call in self.tool_calls
            ]
        return message

    def _content(self, place: str) -> str | list[dict[str, Any]]:
        """Parts that are all text are joined to one string, which every chat template supports. Raises ApiError."""
        if not isinstance(self.content, list):
            return self.text
        content = [part.for_ring(f"{place}[{i}]") for i, part in enumerate(self.content)]
        if all(part["type"] == "text" for part in content):
            return "\n".join(part["text"] for part in content)
        return content

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal or "" for part in self.content)
        return self.content or self.refusal or ""


class ChatRequest(Common, kw_only=True):
    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """Raises ApiError."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("needs logprobs", "top_logprobs")
        if other := set(self.modalities or ()) - {"text"}:
            raise invalid(f"has {min(other)[:64]!r}, only text is supported", "modalities")
        if not self.messages:
            raise invalid("is empty", "messages")
        if len(self.messages) > MAX_MESSAGES:
            raise invalid(f"has {len(self.messages)} messages, at most {MAX_MESSAGES} are allowed", "messages")
        if _is_deeper(self.chat_template_kwargs, MAX_DEPTH):
            raise invalid(f"is nested more than {MAX_DEPTH} levels deep", "chat_template_kwargs")

    def prompt(self) -> list[dict[str, Any]]:
        """Raises ApiError."""
        return [message.for_ring(f"messages[{i}]") for i, message in enumerate(self.messages)]

    @property
    def continued_text(self) -> str:
        """The text of the final message if the output continues it, otherwise empty."""
        return self.messages[-1].text if self.continue_final_message else ""

    def params(self) -> dict[str, str]:
        variables = {f"spec.chat.template_kwargs.{name}": name for name in self._template_variables()}
        return {**super().params(), "spec.output.logprobs": "top_logprobs", **variables}

    def options(self) -> dict[str, Any]:
        """All options of the ring's request except those for tools."""
        options = {
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "continue_final_message": self.continue_final_message,
            "template_kwargs": self._template_variables() | (self.chat_template_kwargs or {}) or None,
        }
        return super().options() | {name: value for name, value in options.items() if value is not None}

    def _template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that have their own fields in the request."""
        return {name: value for name in TEMPLATE_VARIABLES if (value := getattr(self, name)) is not None}


def _image(url: str, place: str) -> bytes:
    start = DATA_URL.match(url)
    if start is None:
        raise invalid("is not a data: URL of an image in base64; other URLs are not fetched", place)
    try:
        return base64.b64decode(url[start.end() :], validate=True)
    except binascii.Error as error:
        raise invalid(f"is not valid base64: {error}", place) from error


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether a JSON value is nested more than `levels` deep. The recursion ends there, because the JSON decoder
    accepts values that are nested more deeply than calls of Python functions can be."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
