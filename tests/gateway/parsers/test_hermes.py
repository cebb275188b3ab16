"""Tool calls in the text of a model, split into pieces in any way."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine_worker.guided.matchers import GuideError, compile_guide
from gateway.api.chat import _guide_with_tools
from gateway.errors import ApiError
from gateway.parsers.hermes import CallsOrAnswer, HermesParser, fault_of, grammar
from gateway.parsers.parts import CallArguments, CallBegin, Text
from gateway.requests.body import decode
from gateway.requests.chat import ChatRequest
from gateway.requests.tools import Function, Tool
from sluice.wire.params import Guide, GuideKind

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOKENIZER = LLTokenizer("byte")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\\"ö}ln", "n": [1, {"a": "\\\\"}]}}\n</tool_call>'
ARGUMENTS = '{"city": "K\\"ö}ln", "n": [1, {"a": "\\\\"}]}'
TEXTS = {
    "no call": ("a < b <tool", "a < b <tool", []),
    "a call": (CALL, "", [("weather", ARGUMENTS)]),
    "text before": (f"Let me see.\n{CALL}", "Let me see.", [("weather", ARGUMENTS)]),
    "two": (f"{CALL}\n{CALL}", "", [("weather", ARGUMENTS)] * 2),
    "the end tag in a text": (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call>"}')],
    ),
    "arguments first": ('<tool_call>{"arguments": {"a":1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a":1}}</tool_call>', "", [("f", '{"a": 1}')]),
    "not closed": ('<tool_call>{"name": "f", "arguments": {"a":1}}', "", [("f", '{"a":1}')]),
    "not closed, otherwise": ('<tool_call>{"arguments": {}, "name": "f"}', "", [("f", "{}")]),
    "cut": ('<tool_call>{"name": "f", "arguments": {"a":', "", [("f", '{"a":')]),
    "cut in its head": ('<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
    "no JSON": ("<tool_call>hello</tool_call> there", "<tool_call>hello</tool_call> there", []),
    "no object": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "null": ('<tool_call>{"arguments": null, "name": "f"}</tool_call>', "", [("f", "{}")]),
    "a list": ('<tool_call>{"arguments": [1], "name": "f"}</tool_call>',) * 2 + ([],),
    "no name": ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
    "deep": ("<tool_call>" + "[" * 5000 + "</tool_call>", "<tool_call>" + "[" * 5000 + "</tool_call>", []),
    "text after": (f"{CALL}\nDone.", "\nDone.", [("weather", ARGUMENTS)]),
    "blank": ("  \n", "  \n", []),
}


def parsed(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = HermesParser()
    parts = [part for piece in pieces for part in parser.feed(piece)] + [*parser.end(cut=False)]
    text = "".join(part.text for part in parts if isinstance(part, Text))
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    arguments = [""] * len(names)
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call] += part.text
    assert [part.call for part in parts if isinstance(part, CallBegin)] == list(range(len(names)))
    return text, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("name", TEXTS)
def test_whole_and_character_by_character(name):
    text, content, calls = TEXTS[name]
    assert parsed([text]) == (content, calls)
    assert parsed(list(text)) == (content, calls)


@given(st.data())
def test_in_any_pieces(data):
    text, content, calls = TEXTS[data.draw(st.sampled_from(sorted(TEXTS)))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(pieces) == (content, calls)


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"', "\\", '"name": "f", "arguments": ', "x", "\n"])
    )
)
def test_any_text(pieces):
    assert parsed(pieces) == parsed(["".join(pieces)])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Sure.\n<tool_call", "Sure."),
        ("\n<tool_call", ""),
        ("\n<tool_call>", ""),
        ('Sure.\n<tool_call>{"name": "f', "Sure."),
        (f"{CALL}\n<tool_c", ""),
        (f'{CALL}\n<tool_call>{{"na', ""),
        ("if a <", "if a <"),
        ("Sure.\n", "Sure.\n"),
    ],
)
def test_half_a_tag_or_head_is_no_content_if_the_output_was_cut(text, content):
    for pieces in ([text], list(text)):
        parser = HermesParser()
        parts = [part for piece in pieces for part in parser.feed(piece)] + [*parser.end(cut=True)]
        assert "".join(part.text for part in parts if isinstance(part, Text)) == content


def test_arguments_are_passed_on_as_they_arrive():
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f", "argu') == []
    begin, first = parser.feed('ments": {"a"')
    assert (begin.name, first.text) == ("f", '{"a"')
    assert begin.id.startswith("call_")
    (more,) = parser.feed(": 1")
    assert more.text == ": 1"
    (last,) = parser.feed("}}\n</tool_call>")
    assert last.text == "}"


def test_a_grammar_names_the_functions():
    schema = msgspec.Raw(json.dumps({"type": "object", "pattern": "::="}).encode())
    text = grammar([Function('a"b', parameters=schema), Function("g")], several=True)
    assert "::=" not in text
    assert text.count("%json") == 2
    assert 'arguments_1: %json {"type": "object", "properties": {}, "additionalProperties": false}' in text


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ('{"type": "strin"}', "Invalid type: strin"),
        ('{\n"type": "object",\n"not": {}}', 'Unimplemented keys: ["not"]'),
        ("[\n1\n]", "schema must be an object or boolean"),
        ('{"type": "string", "pattern": "(a"}', "regex parse error:\n    (a\n    ^\nerror: unclosed group"),
    ],
)
@pytest.mark.parametrize("answer", [None, '{\n"type": "object"\n}'])
def test_a_refused_grammar_names_the_function_at_fault(parameters, reason, answer):
    """The engine's own errors, which quote lines of the grammar."""
    schemas = ['{\n"type": "object"\n}', parameters, '{"type": "object"}']
    functions = [
        Function(name, parameters=msgspec.Raw(schema.encode())) for name, schema in zip("fgh", schemas, strict=True)
    ]
    text = grammar(functions, several=True, answer=answer)
    with pytest.raises(GuideError) as refused:
        compile_guide(TOKENIZER, Guide(GuideKind.EBNF, text))
    assert "arguments_1" in str(refused.value)
    assert fault_of(text, functions, str(refused.value)) == (functions[1], reason)


def test_a_refused_grammar_may_have_no_function_at_fault():
    functions = [Function("f")]
    text = grammar(functions, several=False, answer='{"type": "strin"}')
    with pytest.raises(GuideError) as refused:
        compile_guide(TOKENIZER, Guide(GuideKind.EBNF, text))
    assert fault_of(text, functions, str(refused.value)) == (None, "Invalid type: strin")
    assert fault_of(text, functions, "it has too many rules") == (None, "it has too many rules")
    assert fault_of(text, functions, "at 99(1): odd") == (None, "odd")


@pytest.mark.parametrize(
    ("choice", "output"),
    [
        (None, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
        ("auto", '{"a": 1}'),
    ],
)
def test_a_response_format_permits_calls(choice, output):
    fields = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "tool_choice": choice,
    }
    request = decode(json.dumps(fields).encode(), ChatRequest).fields
    guide = _guide_with_tools(request, request.tools)
    assert guide.param == "response_format"
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(guide.option["ebnf"]))
    assert matcher.consume_tokens(TOKENIZER.tokenize_str(output))
    assert matcher.is_accepting()


def test_a_guide_that_cannot_permit_calls_is_refused_beside_tools():
    request = ChatRequest(messages=[], guided_regex="a")
    with pytest.raises(ApiError, match="guided_regex: cannot be combined with tools"):
        _guide_with_tools(request, [Tool(Function("f"))])


ANSWERS = {
    "an answer with the tag": ('{"x": "<tool_call>{\\"name\\": \\"f\\"}</tool_call>"}', 0),
    "white space and an answer": ('\n{"x": "<tool_call>"}', 0),
    "a call": ('<tool_call>\n{"name": "f", "arguments": {"x": "<tool_call>"}}\n</tool_call>', 1),
    "nothing": ("", 0),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_under_a_grammar_an_output_is_calls_or_an_answer(name):
    text, calls = ANSWERS[name]
    for pieces in ([text], list(text)):
        parser = CallsOrAnswer()
        parts = [part for piece in pieces for part in parser.feed(piece)] + [*parser.end(cut=False)]
        assert sum(isinstance(part, CallBegin) for part in parts) == calls
        assert "".join(part.text for part in parts if isinstance(part, Text)) == ("" if calls else text)


def test_half_a_tag_of_an_output_that_was_cut_is_not_shown():
    parser = CallsOrAnswer()
    assert [*parser.feed("<tool_c"), *parser.end(cut=True)] == []
