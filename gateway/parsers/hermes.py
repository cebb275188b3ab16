"""Tool calls as Hermes and Qwen models write them: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

import json
import re
import secrets
from collections.abc import Sequence

from gateway.parsers.parts import CallArguments, CallBegin, Parser, Part, PlainText, Text, UntilTag
from gateway.requests.tools import Function

BEGIN, END = "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
MAX_HEAD = 1024
"""Characters in which the head of a call must be complete. Otherwise the call is buffered and passed on as a whole."""
POSITION = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
"""At the start of the ring's reason for refusing a grammar: the line at fault."""
QUOTED = re.compile(r"\n +\d+ \| ")
"""In such a reason: the start of a line that it quotes."""
RULE = re.compile(r"(?:call|arguments)_(\d+):")
NO_ARGUMENTS = '{"type": "object", "properties": {}, "additionalProperties": false}'
"""The schema of a function without `parameters`, which takes none."""


class HermesParser:
    """Passes on a call's arguments as they arrive. Anything that is not a valid call remains text."""

    def __init__(self) -> None:
        self._until = UntilTag(BEGIN)
        self._blank = ""
        """White space at the end of the text so far. If a call follows, it is not part of the content."""
        self._after_call = False
        self._calls = 0
        self._call: OpenCall | None = None

    def feed(self, text: str) -> Sequence[Part]:
        parts: list[Part] = []
        rest: str | None = text
        while rest:
            if self._call is None:
                before, rest = self._until.feed(rest)
                parts += self._text(before)
                if rest is not None:
                    self._call, self._blank = OpenCall(self._calls, self._blank), ""
            if self._call is not None and rest is not None:
                call_parts, rest = self._call.feed(rest)
                parts += call_parts
                if rest is not None:
                    self._end_call(self._call)
        return parts

    def end(self, cut: bool) -> Sequence[Part]:
        parts: list[Part] = []
        if self._call is not None:
            parts += self._call.end(cut)
            self._after_call = cut
            self._end_call(self._call)
        held = self._until.end(cut=False)
        if cut and len(held) > 1:
            # The beginning of a tag, and the white space before it.
            return parts
        parts += self._text(held)
        return [*parts, Text(self._blank)] if self._blank and not self._after_call else parts

    def _text(self, text: str) -> Sequence[Part]:
        text = self._blank + text
        content = text.rstrip()
        self._blank = text[len(content) :]
        if not content:
            return ()
        self._after_call = False
        return (Text(content),)

    def _end_call(self, call: "OpenCall") -> None:
        self._calls += call.is_call
        self._after_call = self._after_call or call.is_call
        self._call = None


class CallsOrAnswer:
    """Parses outputs under `grammar`: calls, or an answer, which may contain the tag in a string."""

    def __init__(self) -> None:
        self._start = ""
        """The output so far, until it is known which of both it is."""
        self._inner: Parser | None = None

    def feed(self, text: str) -> Sequence[Part]:
        if self._inner is None:
            text = self._start + text
            if len(text) < len(BEGIN) and BEGIN.startswith(text):
                self._start = text
                return ()
            self._inner, self._start = HermesParser() if text.startswith(BEGIN) else PlainText(), ""
        return self._inner.feed(text)

    def end(self, cut: bool) -> Sequence[Part]:
        inner = self._inner or HermesParser()
        return [*inner.feed(self._start), *inner.end(cut)]


class OpenCall:
    """One call, from its opening tag on."""

    def __init__(self, number: int, before: str) -> None:
        """`before`: white space before the tag, which is content if this turns out not to be a call."""
        self._before = before
        self.is_call = False
        """Whether this is a valid call, so its name is known."""
        self._number = number
        self._text = ""
        """The whole text until the head is known; from then on, what may belong to the closing tag."""
        self._arguments: JsonScanner | None = None

    def feed(self, text: str) -> tuple[Sequence[Part], str | None]:
        """The parts that are certain, and the text after the call; None if the call has not ended."""
        if self._arguments is not None:
            return self._continue(self._arguments, text)
        self._text += text
        if head := HEAD.match(self._text[:MAX_HEAD]):
            rest, self._text = self._text[head.end() :], ""
            self._arguments, self.is_call = JsonScanner(), True
            arguments, after_call = self._continue(self._arguments, rest)
            return [_begin(self._number, json.loads(head[1])), *arguments], after_call
        whole, tag, after = self._text.partition(END)
        if not tag:
            return (), None
        return self._whole(whole, self._before + BEGIN + whole + END), after

    def end(self, cut: bool) -> Sequence[Part]:
        """Parts of a call that the end of the output cut short; none if not even its name is complete."""
        otherwise = "" if cut else self._before + BEGIN + self._text
        return () if self._arguments is not None else self._whole(self._text, otherwise)

    def _continue(self, arguments: "JsonScanner", text: str) -> tuple[Sequence[Part], str | None]:
        json_part = arguments.feed(text)
        parts = (CallArguments(self._number, json_part),) if json_part else ()
        # Between the arguments and the closing tag there are only a bracket and white space, which are dropped.
        self._text += text[len(json_part) :]
        _, tag, after = self._text.partition(END)
        self._text = self._text[-len(END) :]
        return parts, after if tag else None

    def _whole(self, text: str, otherwise: str) -> Sequence[Part]:
        """Parts of a buffered call; the text `otherwise` if it is not a valid call."""
        try:
            call = json.loads(text)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {})) or {}
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            is_call = isinstance(name, str) and isinstance(json.loads(written), dict)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            is_call = False
        if not is_call:
            return (Text(otherwise),) if otherwise else ()
        self.is_call = True
        return _begin(self._number, name), CallArguments(self._number, written)


class JsonScanner:
    """Finds the end of a JSON object that arrives in pieces."""

    MARKS = re.compile(r'[{}\[\]"\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._ended = False
        self._escaped = False
        """Whether the last character was a backslash that escapes the next one."""

    def feed(self, text: str) -> str:
        """The part of the text that belongs to the object."""
        at = 1 if self._escaped and text else 0
        if self._ended or not text:
            return ""
        self._escaped = False
        while mark := self.MARKS.search(text, at):
            at = mark.end()
            if self._in_string and mark[0] == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth == 0:
                    self._ended = True
                    return text[:at]
        return text


def grammar(functions: Sequence[Function], several: bool, answer: str | None = None) -> str:
    """A Lark grammar for one call of one of these functions, or `several`. `answer`: a JSON schema of the output that
    may be written in place of calls; None if a call is required."""
    more_calls = f'("\\n" {_literal(BEGIN)} call {_literal(END)})*' if several else ""
    close = _literal("}\n")
    lines = [
        "start: calls" if answer is None else f"start: calls | answer\nanswer: %json {_compact(answer)}",
        f"calls: {_literal(BEGIN)} call {_literal(END)} {more_calls}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    for i, function in enumerate(functions):
        head = f'\n{{"name": {json.dumps(function.name)}, "arguments": '
        schema = bytes(function.parameters).decode()
        lines.append(f"call_{i}: {_literal(head)} arguments_{i} {close}")
        lines.append(f"arguments_{i}: %json {NO_ARGUMENTS if schema in ('', 'null') else _compact(schema)}")
    return "\n".join(lines)


def fault_of(grammar_text: str, functions: Sequence[Function], reason: str) -> tuple[Function | None, str]:
    """From the ring's reason for refusing a text of `grammar`: the function at fault, None if unknown or another part,
    and the reason without quotes of the grammar, which the client has not written."""
    place = POSITION.match(reason)
    plain = QUOTED.split(POSITION.sub("", reason, count=1), maxsplit=1)[0].strip()
    lines = grammar_text.split("\n")
    if place is None or not 0 < int(place[1]) <= len(lines):
        return None, plain
    rule = RULE.match(lines[int(place[1]) - 1])
    return (functions[int(rule[1])] if rule else None), plain


def _literal(text: str) -> str:
    return json.dumps(text)


def _compact(schema: str) -> str:
    """The schema on one line, so that each rule of the grammar has one."""
    # The ring reads any grammar that contains ::= as GBNF. In JSON it can only occur within a string, so escape it.
    return schema.replace("::=", ":\\u003a=").replace("\r", " ").replace("\n", " ")


def _begin(number: int, name: str) -> CallBegin:
    return CallBegin(number, f"call_{secrets.token_hex(12)}", name)
