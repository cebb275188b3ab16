"""Responses of /v1/chat/completions: complete, and chunk by chunk."""

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from gateway.answers.ends import end_of, was_cut
from gateway.answers.logprobs import of_chat
from gateway.answers.objects import ChatChoice, ChatDeltaChoice, Delta, FunctionCall, Message, ToolCall, ToolCallDelta
from gateway.parsers.choice import NewParser
from gateway.parsers.parts import CallArguments, CallBegin, Parser, Part, Reasoning, Text
from sluice.client import Chunk, Output


def whole(output: Output, parser: Parser, with_logprobs: bool) -> ChatChoice:
    parts = [*parser.feed(output.text), *parser.end(was_cut(output))]
    calls = _calls(parts)
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return ChatChoice(
        index=output.index,
        message=Message(
            text if text or not calls else None, reasoning_content=reasoning or UNSET, tool_calls=calls or UNSET
        ),
        logprobs=of_chat(output.logprobs) if with_logprobs else None,
        **end_of(output, bool(calls)),
    )


def _calls(parts: Sequence[Part]) -> list[ToolCall]:
    begun = [part for part in parts if isinstance(part, CallBegin)]
    arguments = [""] * len(begun)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call] += part.text
    return [ToolCall(call.id, FunctionCall(call.name, arguments[call.call])) for call in begun]


class ChatDeltas:
    """Turns the chunks of a stream into chat chunks. The first chunk of each choice carries the role."""

    def __init__(self, new_parser: NewParser, with_logprobs: bool) -> None:
        self._new_parser = new_parser
        self._with_logprobs = with_logprobs
        self._parsers: dict[int, Parser] = {}
        self._called: set[int] = set()

    def choices(self, chunk: Chunk, prompt_tail: str) -> Iterator[ChatDeltaChoice]:
        index = chunk.index
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._new_parser(prompt_tail)
            yield ChatDeltaChoice(index=index, delta=Delta(role="assistant", content=""))
        logprobs = of_chat(chunk.logprobs) if self._with_logprobs and chunk.logprobs else None
        parts = parser.feed(chunk.text)
        if chunk.finish_reason is not None:
            parts = [*parts, *parser.end(was_cut(chunk))]
        for part in parts:
            if isinstance(part, CallBegin):
                self._called.add(index)
            yield ChatDeltaChoice(index=index, delta=_delta(part), logprobs=logprobs)
            logprobs = None
        if logprobs is not None:
            # These belong to tokens whose text is held back.
            yield ChatDeltaChoice(index=index, delta=Delta(), logprobs=logprobs)
        if chunk.finish_reason is not None:
            yield ChatDeltaChoice(index=index, delta=Delta(), **end_of(chunk, index in self._called))


def _delta(part: Part) -> Delta:
    match part:
        case Text(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text)
        case CallBegin(number, call_id, name):
            call = ToolCallDelta(number, FunctionCall(name, ""), call_id, "function")
            return Delta(tool_calls=[call])
        case CallArguments(number, text):
            return Delta(tool_calls=[ToolCallDelta(number, FunctionCall(arguments=text))])
