"""White space in the JSON of every guide, and of required tool calls, is bounded: in the masks themselves."""

import json

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher

from engine_worker.guided.matchers import Tokens, compile_guide, load_tokens
from gateway.parsers.hermes import grammar
from gateway.requests.tools import Function
from sluice.checkpoint.vocabulary import Vocabulary
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.tools import TOKENIZER_FILE, VOCAB, ids, tokenizer

BOUND = 22
"""Characters: a line break and 20 characters of indentation."""
ARRAY = '{"type": "array"}'
TAG = {"structures": [{"begin": "<f>", "schema": json.loads(ARRAY), "end": ""}], "triggers": ["<f>"]}
CALL = '<tool_call>\n{"name": "f", "arguments": '


def required_call(parameters: str, *, several: bool = True, answer: str | None = None) -> Guide:
    """The guide of `tool_choice: required`; with `answer`, that of a response format beside tools."""
    return Guide(GuideKind.EBNF, grammar([Function("f", parameters=msgspec.Raw(parameters.encode()))], several, answer))


GUIDES = {
    "json object": (Guide(GuideKind.JSON_OBJECT), "{"),
    "json schema": (Guide(GuideKind.JSON_SCHEMA, ARRAY), "["),
    "structural tag": (Guide(GuideKind.STRUCTURAL_TAG, json.dumps(TAG)), "<f>["),
    "Lark": (Guide(GuideKind.EBNF, f'start: "x" %json {ARRAY} "y"'), "x["),
    "Lark, any value": (Guide(GuideKind.EBNF, 'start: "x" %json true "y"'), "x["),
    "required call": (required_call('{"type": "object"}'), CALL + "{"),
    "required call, one": (required_call('{"type": "object"}', several=False), CALL + "{"),
    "required call, inside": (required_call('{"type": "object"}'), CALL + '{"a": [1,'),
    "required call, no parameters": (required_call(""), CALL + "{"),
    "required call, any parameters": (required_call("true"), CALL + "{"),
    "required call, second": (required_call("{}"), CALL + "[1]}\n</tool_call>\n" + CALL + "["),
    "call or answer, a call": (required_call("{}", answer=ARRAY), CALL + "["),
    "call or answer, an answer": (required_call("{}", answer=ARRAY), "["),
}


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return load_tokens(TOKENIZER_FILE, VOCAB)


@pytest.fixture(scope="module")
def blanks() -> dict[int, int]:
    """The length of each token that is white space."""
    vocabulary = Vocabulary(tokenizer())
    texts = {token: vocabulary.bytes_of(token) for token in range(VOCAB)}
    return {token: len(text) for token, text in texts.items() if text and not text.strip()}


@pytest.mark.parametrize("name", GUIDES)
def test_a_model_that_repeats_white_space_must_go_on_after_the_bound(tokens, blanks, name):
    guide, before = GUIDES[name]
    matcher = compile_guide(tokens.tokenizer, guide)
    assert matcher.consume_tokens(ids(before))
    first = allowed_blanks(matcher, blanks)
    assert first, "some white space is allowed"
    for blank in first:
        written, copy = blanks[blank], matcher.deep_copy()
        assert copy.consume_token(blank)
        while more := allowed_blanks(copy, blanks):
            longest = max(more, key=blanks.__getitem__)
            assert copy.consume_token(longest)
            written += blanks[longest]
            assert written <= BOUND
        assert allowed(copy), "the output goes on"


def allowed(matcher: LLMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits[:VOCAB]).tolist()
    return tokens


def allowed_blanks(matcher: LLMatcher, blanks: dict[int, int]) -> list[int]:
    return [token for token in allowed(matcher) if token in blanks]
