"""Reasoning before an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.choice import parser_for, tags_of
from gateway.parsers.hermes import HermesParser
from gateway.parsers.parts import CallBegin, PlainText, Reasoning, Text
from gateway.parsers.reasoning import ReasoningParser
from sluice.settings.gateway import Parsers

CASES = {
    "reasoning": (False, "<think>\nhm </th hm\n</think>\n\nyes", "hm </th hm\n", "yes"),
    "none": (False, "yes <think>no</think>", "", "yes <think>no</think>"),
    "empty": (False, "<think>\n\n</think>\n\nyes", "", "yes"),
    "cut": (False, "<think>hm </thin", "hm </thin", ""),
    "cut tag": (False, "<thi", "", "<thi"),
    "nothing": (False, "", "", ""),
    "begun": (True, "hm</think>\nyes", "hm", "yes"),
    "begun with the tag": (True, "<think>\nhm</think>\nyes", "hm", "yes"),
    "begun and cut": (True, "hm", "hm", ""),
    "begun with half a tag": (True, "<thi", "<thi", ""),
    "white space first": (False, "\n<think>hm</think>yes", "hm", "yes"),
}


def parsed(begun: bool, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(begun, PlainText())
    parts = [part for piece in pieces for part in parser.feed(piece)] + [*parser.end(cut=False)]
    return tuple("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Reasoning, Text))


@pytest.mark.parametrize("name", CASES)
def test_whole_and_character_by_character(name):
    begun, text, reasoning, answer = CASES[name]
    assert parsed(begun, [text]) == (reasoning, answer)
    assert parsed(begun, list(text)) == (reasoning, answer)


@given(st.booleans(), st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "<", "x"])))
def test_any_text(begun, pieces):
    assert parsed(begun, pieces) == parsed(begun, ["".join(pieces)])


def test_tool_calls_after_reasoning():
    parser = ReasoningParser(False, HermesParser())
    text = '<think>hm</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parts = [part for piece in text for part in parser.feed(piece)] + [*parser.end(cut=False)]
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["f"]


def test_which_parser():
    parsers = Parsers(tool_parser="hermes", reasoning_parser="qwen3")
    assert isinstance(parser_for(parsers, tools=True, guided=True)(""), HermesParser)
    assert isinstance(parser_for(parsers, tools=False, guided=True)(""), PlainText)
    assert isinstance(parser_for(parsers, tools=True, guided=False)(""), ReasoningParser)
    assert isinstance(parser_for(Parsers(), tools=True, guided=False)(""), PlainText)


PROMPTS = {
    "open": ("<|im_start|>assistant\n<think>\n", "", [True, True]),
    "closed": ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", [False, False]),
    "no tag": ("<|im_start|>assistant\n", "", [False, True]),
    "a tag of the user": ("<think><|im_end|>\n<|im_start|>assistant\n", "", [False, True]),
    "continued reasoning": ("<think>\nWell, ", "<think>\nWell, ", [True, True]),
    "continued answer": ("</think>\n\nYes, ", "<think>no</think>Yes, ", [False, False]),
    "continued answer without reasoning": ("Yes, ", "Yes, ", [False, False]),
    "continued nothing": ("<|im_start|>assistant\n<think>\n", " ", [True, True]),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_the_prompt_shows_whether_the_output_begins_within_reasoning(name):
    prompt_tail, continued, expected = PROMPTS[name]
    begun = []
    for parser in ("qwen3", "deepseek_r1"):
        new = parser_for(Parsers(reasoning_parser=parser), tools=False, guided=False, continued=continued)
        begun.append(isinstance(new(prompt_tail).feed("hm</think>")[0], Reasoning))
    assert begun == expected


def test_the_tags_that_parsers_look_for():
    parsers = Parsers(tool_parser="hermes", reasoning_parser="qwen3")
    tools, reasoning = ["<tool_call>", "</tool_call>"], ["<think>", "</think>"]
    assert tags_of(parsers, tools=True, guided=False) == tools + reasoning
    assert tags_of(parsers, tools=True, guided=True) == tools
    assert tags_of(parsers, tools=False, guided=True) == []
    assert tags_of(Parsers(), tools=True, guided=False) == []
