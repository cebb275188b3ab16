"""/v1/chat/completions."""

from collections.abc import Iterable, Sequence
from functools import partial

from gateway.answers import chat
from gateway.answers.chat import ChatDeltas
from gateway.answers.objects import ChatChoice, ChatDeltaChoice
from gateway.api.call import GenerationCall, Item, read
from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway
from gateway.errors import invalid
from gateway.parsers import hermes
from gateway.parsers.choice import parser_for, reasons, tags_of
from gateway.parsers.reasoning import TAIL_TOKENS
from gateway.requests.chat import REFUSED, WITHOUT_MEANING, ChatRequest
from gateway.requests.guides import Guide, guide_of
from gateway.requests.tools import Function, NamedTool, Tool, offered_tools, required_functions
from sluice.client import Generation


async def chat_complete(gateway: Gateway, exchange: Exchange) -> bytes | None:
    """Raises ApiError."""
    body = await read(gateway, exchange, ChatRequest, REFUSED, WITHOUT_MEANING)
    tools = bytes(body.raw["tools"]).decode() if "tools" in body.raw else ""
    return await ChatCall(gateway, exchange, body.fields, tools).respond()


ANY_OBJECT = '{"type": "object"}'
NO_PARSER = (
    "this gateway has no parser for tool calls: start it with --tool-parser hermes, or the ring with "
    "sluice serve --set gateway.tool_parser=hermes"
)


class ChatCall(GenerationCall[ChatRequest]):
    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, gateway: Gateway, exchange: Exchange, request: ChatRequest, tools_json: str) -> None:
        """`tools_json`: the request's `tools`, exactly as the client sent them."""
        tools = offered_tools(request.tools, request.tool_choice)
        if tools and gateway.settings.tool_parser is None:
            raise invalid(NO_PARSER, "tools")
        guide = _guide_with_tools(request, tools)
        super().__init__(gateway, exchange, request, [request.prompt()], guide)
        if tools:
            self._options["tools_json"] = tools_json
        self._with_logprobs = bool(request.logprobs)
        parsed = gateway.settings, bool(tools), guide is not None
        if tags := tags_of(*parsed):
            self._options["keep_special_tokens"] = tags
        if reasons(gateway.settings, guide is not None):
            self._options["prompt_tail"] = TAIL_TOKENS
        # Beside tools, no other guide is a grammar.
        by_grammar = guide is not None and "ebnf" in guide.option
        self._new_parser = parser_for(*parsed, request.continued_text, by_grammar=by_grammar)
        self._deltas = ChatDeltas(self._new_parser, self._with_logprobs)

    def choices_of(self, generations: Sequence[Generation]) -> Iterable[ChatChoice]:
        (generation,) = generations
        for output in generation.outputs:
            yield chat.whole(output, self._new_parser(generation.prompt_tail), self._with_logprobs)

    def deltas_of(self, item: Item) -> Iterable[ChatDeltaChoice]:
        return self._deltas.choices(item.chunk, item.stream.prompt_tail)


def _guide_with_tools(request: ChatRequest, tools: list[Tool]) -> Guide | None:
    """The guide of the whole output, including tool calls. Raises ApiError."""
    guide = guide_of(request)
    several = not isinstance(request.tool_choice, NamedTool) and request.parallel_tool_calls is not False
    if functions := required_functions(tools, request.tool_choice):
        if guide is not None:
            raise invalid(f"cannot be combined with {guide.param}", "tool_choice")
        return _guide_of_calls("tools", functions, several)
    if not tools or guide is None or "structural_tag" in guide.option:
        return guide
    answer = guide.option.get("json_schema", ANY_OBJECT if "json_object" in guide.option else None)
    if answer is None:
        raise invalid("cannot be combined with tools, unless tool_choice is none", guide.param)
    return _guide_of_calls(guide.param, [tool.function for tool in tools], several, answer)


def _guide_of_calls(param: str, functions: Sequence[Function], several: bool, answer: str | None = None) -> Guide:
    """The arguments are those of `hermes.grammar`. `param`: the field at fault, unless a function is."""
    text = hermes.grammar(functions, several, answer)
    return Guide(param, {"ebnf": text}, partial(_explain, param, functions, text))


def _explain(param: str, functions: Sequence[Function], text: str, reason: str) -> tuple[str, str]:
    """The field and the reason for which the ring refused the grammar `text`."""
    function, reason = hermes.fault_of(text, functions, reason)
    return (param, reason) if function is None else ("tools", f"parameters of {function.name[:64]!r}: {reason}")
