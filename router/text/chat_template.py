"""Renders the model's chat template like transformers' `apply_chat_template`, with the same sandbox and filters."""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from router.errors import RequestError, Violation, shown
from router.validate.chat import ChatPrompt
from sluice.ring.checkpoint import CheckpointError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PROBE = "PROBE_OF_CONTENT"
FINAL_MESSAGE_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled template with the model's special tokens. Raises CheckpointError if it cannot be compiled."""

    def __init__(self, source: str, tokenizer_config: dict[str, Any], image: str = "") -> None:
        """`image`: the image placeholder, for templates that do not write it themselves."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_PlainDict(), namespace=_PlainNamespace
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is invalid: line {error.lineno}: {error.message}") from error
        self._special_tokens = _special_tokens(tokenizer_config)
        self._image = image
        accepts_parts = self._shows([{"type": "text", "text": PROBE}])
        self._needs_parts = accepts_parts and not self._shows(PROBE)
        """Whether the template accepts only lists of parts as content."""
        self._needs_text = not accepts_parts
        """Whether the template accepts only strings as content."""

    def render(self, chat: ChatPrompt) -> str:
        """The prompt's text. Raises RequestError if the template rejects the messages."""
        messages = [message | {"content": self._content(message["content"])} for message in chat.messages]
        final = ""
        # A mark shows where the final message ends in the rendered text, so that what the template appends can be cut.
        if chat.continue_final_message:
            final, messages[-1]["content"] = _marked(messages[-1]["content"])
        variables = {"documents": None} | self._special_tokens | chat.variables
        # Set these last, so that the caller's template_kwargs cannot replace the messages.
        variables |= {"messages": messages, "tools": chat.tools, "add_generation_prompt": chat.add_generation_prompt}
        try:
            text = self._template.render(variables)
        except Exception as error:  # a template is a program and may raise anything
            description = f"the chat template rejects these messages: {shown(str(error))}"
            raise RequestError.invalid([Violation("spec.chat", description, private=True)]) from error
        return _cut_after_final_message(text, final) if chat.continue_final_message else text

    def _shows(self, content: Any) -> bool:
        """Whether the template renders the text of this content, rather than Python's representation of a list."""
        messages = [{"role": "user", "content": content}]
        variables = self._special_tokens | {"messages": messages, "tools": None, "add_generation_prompt": True}
        try:
            text = self._template.render({"documents": None} | variables)
        except Exception:  # noqa: BLE001 - a template is a program and may raise anything
            return False
        return PROBE in text and f"'{PROBE}'" not in text

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._needs_parts else content
        if self._needs_text:
            return "".join(part.get("text", self._image) for part in content)
        return [dict(part) for part in content]


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's filter would escape HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
        raise RequestError.invalid([Violation("spec.chat.continue_final_message", description)])
    text = content[-1]["text"]
    return text, [*content[:-1], content[-1] | {"text": text + FINAL_MESSAGE_END}]


def _cut_after_final_message(text: str, final_message: str) -> str:
    mark = FINAL_MESSAGE_END.strip()
    if mark not in text or final_message.strip() not in text:
        description = "the chat template does not show the final message, so it cannot be continued"
        raise RequestError.invalid([Violation("spec.chat", description)])
    end = text.rindex(mark)
    # If the template trims messages, it has removed the mark's trailing space. Then trim the message's text too.
    untrimmed = text[end : end + len(FINAL_MESSAGE_END)] == FINAL_MESSAGE_END
    return text[:end] if untrimmed else text[:end].rstrip()
