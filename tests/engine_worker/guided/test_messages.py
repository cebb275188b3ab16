"""Errors of guides, in terms of the client's guide and not of llguidance's options."""

import json

import pytest

from engine_worker.guided.matchers import GuideError, compile_guide, load_tokens
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.tools import TOKENIZER_FILE, VOCAB, allowed, followed, mask, regex

STATES = "its regular expressions have too many states together"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokens(TOKENIZER_FILE, VOCAB).tokenizer


def lengths(pattern: str) -> Guide:
    patterns = [{"pattern": pattern.format(i + 2, letter=chr(97 + i % 26))} for i in range(30)]
    return Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": "string", "allOf": patterns}))


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (lengths("^(.{{{0}}})*$"), STATES),
        (lengths("^.*{letter}.{{{0}}}$"), STATES),
        (Guide(GuideKind.EBNF, "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), "it is nested too deeply"),
    ],
    ids=["precomputation", "emptiness", "depth"],
)
def test_limits_of_the_library_are_named_in_terms_of_the_guide(tokenizer, guide, message):
    with pytest.raises(GuideError) as caught:
        compile_guide(tokenizer, guide)
    assert str(caught.value) == message


@pytest.mark.process
def test_a_guide_that_exceeds_a_limit_while_it_is_followed(guides):
    (sequence,) = followed(guides, regex("((a{1,500}){1,500}){1,500}"), ends=())
    output: list[int] = []
    while (result := mask(guides, sequence, output)).fault is None:
        output.append(min(allowed(result)))
    assert "non-verbose" not in result.fault.message
