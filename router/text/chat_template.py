"""Renders the model's chat template like transformers' `apply_chat_template`, with the same sandbox and filters."""

import json
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, parser
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from router.errors import Reason, RequestError, shown
from router.parse.chat import ChatPrompt
from router.text.bounds import BoundedEnvironment, TooLargeError, TooSlowError
from sluice.checkpoint.errors import CheckpointError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PROBE = "PROBE_OF_CONTENT"
PROBE_CALL = "probe0000"
"""Nine letters and digits, which the templates of Mistral require of the id of a call."""
MIN_CHARACTERS = 1 << 16
"""Limit of a template's text where a model's context would allow less: enough for the probes."""
MAX_SOURCE = 1 << 20
"""Characters of a template; the longest known one has 30,000."""
FINAL_MESSAGE_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplates:
    """A model's chat templates: one for chats with tools, if there is one, and one for all others, as transformers
    chooses."""

    def __init__(
        self,
        default: str | None,
        tool_use: str | None,
        tokenizer_config: dict[str, Any],
        max_characters: int,
        image: str = "",
    ) -> None:
        """`max_characters`: limit of a rendered text. `image`: the image placeholder, for templates that do not write
        it themselves. Raises CheckpointError if a template cannot be compiled."""

        def compiled(source: str | None) -> ChatTemplate | None:
            return None if source is None else ChatTemplate(source, tokenizer_config, image, max_characters)

        self._default = compiled(default)
        self._with_tools = self._default if tool_use is None else compiled(tool_use)

    @property
    def show_tools(self) -> bool:
        return self._with_tools is not None and self._with_tools.shows_tools

    def render(self, chat: ChatPrompt) -> str:
        """The prompt's text. Raises RequestError if the template rejects the messages."""
        template = self._with_tools if chat.tools else self._default
        if template is None:
            what = "only a chat template for chats with tools" if self._with_tools else "no chat template"
            field = "spec.chat.tools_json" if self._with_tools else chat.field
            raise RequestError.at(field, f"the model has {what}", reason=Reason.NOT_SUPPORTED)
        return template.render(chat)


class ChatTemplate:
    """A compiled template with the model's special tokens. Raises CheckpointError if it cannot be compiled."""

    def __init__(
        self, source: str, tokenizer_config: dict[str, Any], image: str = "", max_characters: int = MIN_CHARACTERS
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise CheckpointError(f"the chat template has {len(source)} characters, at most {MAX_SOURCE} are allowed")
        environment = BoundedEnvironment(
            max(max_characters, MIN_CHARACTERS),
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlock, ext.loopcontrols],
        )
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_PlainDict(), namespace=_PlainNamespace
        )
        try:
            self.shows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            """Whether the template reads the variable `tools`."""
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is invalid: line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
            raise CheckpointError(f"the chat template cannot be compiled: {error}") from error
        self._max_characters = max_characters
        self._special_tokens = _special_tokens(tokenizer_config)
        self._image = image
        accepts_parts = self._shows([{"type": "text", "text": PROBE}])
        self._needs_parts = accepts_parts and not self._shows(PROBE)
        """Whether the template accepts only lists of parts as content."""
        self._needs_text = not accepts_parts
        """Whether the template accepts only strings as content."""
        self._text_arguments = not self._shows_call({PROBE: 1}) and self._shows_call(f'{{"{PROBE}": 1}}')
        """Whether the template accepts the arguments of tool calls only as JSON text."""

    def render(self, chat: ChatPrompt) -> str:
        """The prompt's text. Raises RequestError if the template rejects the messages."""
        if chat.tools and not self.shows_tools:
            description = "the model's chat template does not use tools"
            raise RequestError.at("spec.chat.tools_json", description, reason=Reason.NOT_SUPPORTED)
        try:
            return self._render(chat, self._text_arguments)
        except (TooLargeError, TooSlowError) as error:
            raise self._beyond_bounds(chat, error) from error
        except RequestError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            if chat.has_calls:
                with suppress(Exception):
                    return self._render(chat, not self._text_arguments)
            description = f"the chat template rejects these messages: {shown(str(error))}"
            raise RequestError.at("spec.chat", description, private=True) from error

    def _render(self, chat: ChatPrompt, text_arguments: bool) -> str:
        messages = [self._message(message, text_arguments) for message in chat.messages]
        final = ""
        # A mark shows where the final message ends in the rendered text, so that what the template appends can be cut.
        if chat.continue_final_message:
            final, messages[-1]["content"] = _marked(messages[-1]["content"])
        variables = {"documents": None} | self._special_tokens | chat.variables
        # Set these last, so that the caller's template_kwargs cannot replace the messages.
        variables |= {"messages": messages, "tools": chat.tools, "add_generation_prompt": chat.add_generation_prompt}
        text = self._template.render(variables)
        return _cut_after_final_message(text, final) if chat.continue_final_message else text

    def _beyond_bounds(self, chat: ChatPrompt, error: Exception) -> RequestError:
        """The error names the largest field: the template may have combined all of them."""
        limit = f"is more than {self._max_characters} characters when rendered, the limit"
        description = str(error) if isinstance(error, TooSlowError) else limit
        return RequestError.at(chat.largest_field, description, reason=Reason.TOO_MANY)

    def _shows(self, content: Any) -> bool:
        """Whether the template renders the text of this content, rather than Python's representation of a list."""
        text = self._probed([{"role": "user", "content": content}])
        return PROBE in text and f"'{PROBE}'" not in text

    def _shows_call(self, arguments: Any) -> bool:
        """Whether the template renders a call with these arguments, and not as Python's representation of a dict."""
        function = {"name": PROBE_CALL, "arguments": arguments}
        call = {"id": PROBE_CALL, "type": "function", "function": function}
        user = {"role": "user", "content": [{"type": "text", "text": "x"}] if self._needs_parts else "x"}
        text = self._probed([user, {"role": "assistant", "content": "", "tool_calls": [call]}])
        return PROBE in text and f"'{PROBE}'" not in text

    def _probed(self, messages: list[dict[str, Any]]) -> str:
        """The text that the template renders; empty if it rejects the messages."""
        variables = self._special_tokens | {"messages": messages, "tools": None, "add_generation_prompt": True}
        try:
            return self._template.render({"documents": None} | variables)
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return ""

    def _message(self, message: dict[str, Any], text_arguments: bool) -> dict[str, Any]:
        converted = message | {"content": self._content(message["content"])}
        if text_arguments and "tool_calls" in message:
            converted["tool_calls"] = list(map(_with_text_arguments, message["tool_calls"]))
        return converted

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._needs_parts else content
        if self._needs_text:
            return "".join(part.get("text", self._image) for part in content)
        return [dict(part) for part in content]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": str(text)}}


class GenerationBlock(ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's text for training. Rendering keeps only the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class _PlainDict:
    """`dict(...)` for templates, without access to the type's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """jinja2's namespace, but without names that begin with an underscore, which would give access to Python's
    internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # No parameter named self, as in jinja2's class, so that `namespace(self=...)` works.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"names in a namespace must not begin with an underscore: {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    tokens = {name: tokenizer_config.get(name) for name in SPECIAL_TOKENS}
    # Older checkpoints describe a token by an object with its text as "content".
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: str(text) for name, text in texts.items() if text is not None}


def _marked(content: Any) -> tuple[str, Any]:
    """The final text of a message's content, and the content with a mark after it. Raises RequestError if it does not
    end with text."""
    if isinstance(content, str):
        return content, content + FINAL_MESSAGE_END
    if not content or content[-1]["type"] != "text":
        description = "does not end with text, so it cannot be continued"
        raise RequestError.at("spec.chat.continue_final_message", description)
    text = content[-1]["text"]
    return text, [*content[:-1], content[-1] | {"text": text + FINAL_MESSAGE_END}]


def _cut_after_final_message(text: str, final_message: str) -> str:
    mark = FINAL_MESSAGE_END.strip()
    if mark not in text or final_message.strip() not in text:
        description = "the chat template does not show the final message, so it cannot be continued"
        raise RequestError.at("spec.chat", description)
    end = text.rindex(mark)
    # If the template trims messages, it has removed the mark's trailing space. Then trim the message's text too.
    untrimmed = text[end : end + len(FINAL_MESSAGE_END)] == FINAL_MESSAGE_END
    return text[:end] if untrimmed else text[:end].rstrip()
