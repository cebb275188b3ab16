"""End ids in masks: where the text is complete, and where the grammar names them."""

import pytest

from engine_worker.guided.grammars import numbered_tokens
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.tools import END, allowed, followed, ids, mask, regex, texts

pytestmark = pytest.mark.process


def test_end_ids_are_allowed_where_the_text_is_complete(guides):
    (sequence,) = followed(guides, regex("[ab]{2,3}"), ends=(END, 7))
    assert texts(mask(guides, sequence, ids("a"))) == {"a", "b", "ab"}
    assert allowed(mask(guides, sequence, ids("a") * 2)) == {END, 7, *ids("a"), *ids("b")}
    assert allowed(mask(guides, sequence, ids("a") * 3)) == {END, 7}


def test_an_end_that_is_text_is_allowed_only_where_the_text_is_complete(guides):
    b = ids("b")[0]
    (sequence,) = followed(guides, regex("a[bc]?"), ends=(b,))
    assert b not in allowed(mask(guides, sequence, []))
    assert allowed(mask(guides, sequence, ids("a"))) == {b, *ids("c")}


def test_complete_outputs(guides):
    (without,) = followed(guides, regex("ab"), ends=())
    assert not mask(guides, without, ids("a")).complete
    assert mask(guides, without, [*ids("a"), *ids("b")]).complete
    (ended,) = followed(guides, regex("ab"))
    text = [*ids("a"), *ids("b")]
    # min_tokens forbids the end: the guide wins.
    assert mask(guides, ended, text, may_end=False).complete
    assert not mask(guides, ended, text).complete


def test_min_tokens_before_the_end(guides):
    (sequence,) = followed(guides, regex("a+"))
    # The end id stays in the mask: `Draw.banned` forbids it.
    assert set(ids("a")) <= allowed(mask(guides, sequence, ids("a"), may_end=False))


@pytest.mark.parametrize("named", [f"<[{END}]>", "<|endoftext|>"])
def test_a_grammar_may_name_an_end(guides, named):
    guide = Guide(GuideKind.EBNF, f'start: "a" {named} "b"')
    (ended,), (ignoring,) = followed(guides, guide), followed(guides, guide, ends=())
    assert allowed(mask(guides, ended, [])) == set(ids("a"))
    assert allowed(mask(guides, ended, ids("a"))) == {END}
    # With ignore_eos.
    assert allowed(mask(guides, ignoring, ids("a"))) == {END}
    assert allowed(mask(guides, ignoring, [*ids("a"), END])) == set(ids("b"))


def test_min_tokens_yields_to_a_grammar_that_names_an_end(guides):
    (sequence,) = followed(guides, Guide(GuideKind.EBNF, f'start: "a" <[{END}]>'))
    assert mask(guides, sequence, ids("a"), may_end=False).complete
    (choosing,) = followed(guides, Guide(GuideKind.EBNF, f'start: "a" (<[{END}]> | "b")'))
    assert allowed(mask(guides, choosing, ids("a"), may_end=False)) == set(ids("b"))


def test_stop_ids_that_a_grammar_names(guides):
    (special,) = followed(guides, Guide(GuideKind.EBNF, 'start: "a" <|im_end|>'), ends=(END, 4095))
    assert allowed(mask(guides, special, ids("a"))) == {4095}
    # Tokens of text are allowed only as ends, where the output matches.
    (text,) = followed(guides, Guide(GuideKind.EBNF, 'start: "a" "b"? "c"'), ends=(END, *ids("b")))
    assert allowed(mask(guides, text, ids("a"))) == set(ids("c"))


@pytest.mark.parametrize("numbers", ["{b}", "7,{b}", "{a}-{c}"])
def test_a_stop_id_with_text_that_a_grammar_names_by_number(guides, numbers):
    a, b, c = (ids(letter)[0] for letter in "abc")
    guide = Guide(GuideKind.EBNF, f'start: "a" <[{numbers.format(a=a, b=b, c=c)}]> "d"')
    (sequence,) = followed(guides, guide, ends=(END, b))
    assert allowed(mask(guides, sequence, [])) == {a}
    assert b in allowed(mask(guides, sequence, [a]))
    # min_tokens forbids the stop id, and the grammar wins where it allows nothing else.
    nothing_else = numbers == "{b}"
    assert mask(guides, sequence, [a], may_end=False).complete is nothing_else


@pytest.mark.parametrize(
    ("text", "numbered"),
    [
        ('start: "a" <[7]> <[10-12,20]>', [7, 10, 11, 12, 20]),
        (r'start: "<[7]>" /<[8]>"/ "\"<[9]>" <[10]> // <[11]>', [10]),
        ('start: "a" <[*]> <[^7]> <|im_end|>', []),
    ],
)
def test_ids_that_a_grammar_names_by_number(text, numbered):
    numbered_ids = numbered_tokens(Guide(GuideKind.EBNF, text))
    assert [token for ids in numbered_ids for token in ids] == numbered


def test_only_grammars_name_ids_by_number():
    assert numbered_tokens(regex("<[7]>")) == ()
