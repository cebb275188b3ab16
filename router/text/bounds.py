"""A jinja environment whose templates are bounded in time and memory while they run.

jinja's sandbox keeps templates from Python's internals and limits a range to 100,000 numbers. Neither limits nested
loops, recursion, or the size of values. Here the code of each block of a template first checks the CPU time, and every
operation that can return much more than it is given checks the size of its result before it computes it.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.parse.chat import CutJson

RENDER_SECONDS = 2.0
"""CPU time of one rendering. The longest chats take a tenth of it."""
MAX_ITEMS = 100_000
"""Elements of a list that a template multiplies or concatenates; jinja's limit for a range."""
MAX_INTEGER_BITS = 4096
OUTPUT_FACTOR = 4
"""How often text may pass through macros and blocks before it is in the rendered text, on average."""
CHECKED_PIECES = 1024
"""Pieces of JSON between two checks of the time."""
WIDTH = re.compile(r"[0-9]+", re.ASCII)
COMPUTED_WIDTH = re.compile(r"%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""A width that is an argument, as in "%*d" and "{:{width}}"."""


class TooLargeError(Exception):
    """A value, or the rendered text, would be larger than the limit."""


class TooSlowError(Exception):
    """The rendering has used up its CPU time."""


class BoundedContext(Context):
    """The variables of one rendering, its end, and the JSON that it may still write."""

    def __init__(self, environment: "BoundedEnvironment", *args: Any, **kwargs: Any) -> None:
        super().__init__(environment, *args, **kwargs)
        self._deadline = time.thread_time() + RENDER_SECONDS
        self._json_left = environment.max_characters
        self._output_left = OUTPUT_FACTOR * environment.max_characters

    def check_time(self) -> None:
        """Raises TooSlowError."""
        if time.thread_time() > self._deadline:
            raise TooSlowError(f"takes more than {RENDER_SECONDS:g} s of CPU time to render")

    def shown(self, value: object) -> str:
        """The text of an expression that a template, a macro or a block shows. Raises TooLargeError."""
        text = str(value)
        self._output_left -= len(text)
        if self._output_left < 0:
            raise TooLargeError
        return text

    def spend_json(self, size: int) -> None:
        """Raises TooLargeError."""
        self._json_left -= size
        if self._json_left < 0:
            raise TooLargeError


class BoundedCode(CodeGenerator):
    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("context.check_time()")
        super().blockvisit(nodes, frame)

    def _output_child_pre(self, *_: Any) -> None:
        self.write("context.shown(")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - the name is jinja's
        # jinja joins the parts by a function of its own, which has no limit.
        self.write("environment.concat(map(str, (")
        for arg in node.nodes:
            self.visit(arg, frame)
            self.write(", ")
        self.write(")))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    code_generator_class = BoundedCode
    context_class = BoundedContext
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, max_characters: int, **options: Any) -> None:
        """`max_characters`: limit of the rendered text, of each text within a template, and of all JSON together."""
        super().__init__(**options)
        self.max_characters = max_characters
        # jinja2 joins the pieces of templates, macros and blocks by the environment's `concat`.
        self.concat = self._concat  # type: ignore[method-assign]
        self.filters |= {
            "tojson": _to_json,
            **{name: self._checked(name, self.filters[name]) for name in ("center", "format", "indent", "replace")},
        }
        for name in ("batch", "slice", "urlize", "wordwrap", "lipsum"):
            # No chat template needs them, and their results may be far larger than their arguments.
            self.filters.pop(name, None)
            self.globals.pop(name, None)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja
        # The sandbox wraps `format`.
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(text, str):
            __self._check_text(getattr(__obj, "__name__", ""), text, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def _concat(self, pieces: Iterable[str]) -> str:
        kept, size = [], 0
        for piece in pieces:
            size += len(piece)
            self._check(size)
            kept.append(piece)
        return "".join(kept)

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter with a check of its result's size."""

        # Takes the context so that jinja does not call it while it compiles.
        @pass_context
        def checked(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(value, Undefined):
                self._check_text(name, str(value), [*args, *kwargs.values()])
            given = (context.eval_ctx,) if name == "replace" else ()
            return function(*given, value, *args, **kwargs)

        return checked

    def _check_operation(self, operator: str, left: Any, right: Any) -> None:
        if operator == "%" and isinstance(left, str):
            self._check_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            self._check(len(left) + len(right))
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            self._check(len(left) + len(right), MAX_ITEMS)
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    self._check(len(value) * times, self.max_characters if isinstance(value, str) else MAX_ITEMS)
            if isinstance(left, int) and isinstance(right, int):
                self._check(left.bit_length() + right.bit_length(), MAX_INTEGER_BITS)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check(left.bit_length() * max(right, 0), MAX_INTEGER_BITS)

    def _check_text(self, name: str, text: str, arguments: list[Any]) -> None:
        """Check the size of what a method or a filter of this name returns for a text. Raises TooLargeError."""
        numbers = [argument for argument in arguments if isinstance(argument, int)]
        texts = [argument for argument in arguments if isinstance(argument, str)]
        largest = max([1, *numbers, *map(len, texts)])
        match name:
            case "center" | "ljust" | "rjust" | "zfill":
                self._check(largest)
            case "expandtabs":
                self._check(len(text) + text.count("\t") * largest)
            case "indent":
                self._check(len(text) + (text.count("\n") + 1) * largest)
            case "replace" if len(texts) > 1:
                self._check(len(text) + text.count(texts[0]) * (len(texts[1]) - len(texts[0])))
            case "join" if arguments and isinstance(arguments[0], list | tuple | str):
                self._check(len(text) * len(arguments[0]) + sum(map(len, filter(_is_text, arguments[0]))))
            case "translate" if arguments and isinstance(arguments[0], Mapping):
                self._check(len(text) * max([1, *map(len, filter(_is_text, arguments[0].values()))]))
            case "format" | "format_map":
                self._check_format(text, arguments)

    def _check_format(self, text: str, arguments: Iterable[Any]) -> None:
        if COMPUTED_WIDTH.search(text):
            raise TooLargeError
        longest = max((len(argument) for argument in arguments if isinstance(argument, str)), default=0)
        fields = text.count("%") + text.count("{")
        self._check(len(text) + sum(map(int, WIDTH.findall(text))) + fields * longest)

    def _check(self, size: int, limit: int | None = None) -> None:
        if size > (self.max_characters if limit is None else limit):
            raise TooLargeError


@pass_context
def _to_json(
    context: BoundedContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's filter would escape HTML, which would change the prompt.
    if isinstance(value, CutJson):
        return str(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        # At most six times as long as what the client sent, and fast.
        text = encoder.encode(value)
        context.spend_json(len(text))
        return text
    # Every line begins with white space that grows with the depth, so the text may be far longer than the value's.
    pieces = []
    for number, piece in enumerate(encoder.iterencode(value)):
        if number % CHECKED_PIECES == 0:
            context.check_time()
        context.spend_json(len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
