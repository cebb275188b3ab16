"""The requests of a load."""

import pytest

from sluice.loadgen.workload import Lengths, Request, WorkloadError, random_requests, read_requests


def test_random_requests_have_the_lengths_that_were_asked_for():
    found = random_requests(200, Lengths(100, 50, spread=0.5), 2.0, seed=1)
    words, outputs = [len(each.prompt.split()) for each in found], [each.max_tokens for each in found]
    assert (min(words), max(words)) == (25, 75)
    assert (min(outputs), max(outputs)) == (25, 75)
    assert len({each.prompt for each in found}) == len(found)


def test_a_seed_is_a_load():
    same, again, other = (random_requests(5, Lengths(20, 10, 0.3), 1.0, seed) for seed in (7, 7, 8))
    assert same == again != other


def test_variants_have_other_words_and_the_same_lengths():
    one, other = (random_requests(5, Lengths(20, 10, 0.3), 1.0, 7, variant) for variant in (0, 1))
    assert {each.prompt for each in one}.isdisjoint(each.prompt for each in other)
    sizes = [[(len(each.prompt.split()), each.max_tokens) for each in load] for load in (one, other)]
    assert sizes[0] == sizes[1]


def test_without_spread_all_are_alike():
    found = random_requests(3, Lengths(10, 4), 1.0, seed=0)
    assert {(len(each.prompt.split()), each.max_tokens) for each in found} == {(10, 4)}


def test_a_file_is_repeated_until_there_are_enough(tmp_path):
    file = tmp_path / "load.jsonl"
    file.write_text('{"prompt": "a b", "output_tokens": 3}\n\n{"prompt_tokens": 8}\n')
    found = read_requests(file, 3, Lengths(100, 50), 2.0, seed=0)
    assert found[0] == found[2] == Request("a b", 3)
    assert len(found[1].prompt.split()) == 4
    assert found[1].max_tokens == 50


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: not a JSON object"),
        ('{"text": "a"}', "line 1: unknown fields text"),
        ('{"output_tokens": 3}', "needs either prompt or prompt_tokens"),
        ('{"prompt": "a", "prompt_tokens": 3}', "needs either prompt or prompt_tokens"),
        ('{"prompt": 1}', "prompt is not a string"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0, must be an integer from 1 to"),
        ('{"prompt_tokens": true}', "prompt_tokens is True"),
        ("", "has no lines"),
    ],
)
def test_a_line_that_is_no_request(tmp_path, line, message):
    file = tmp_path / "load.jsonl"
    file.write_text(line)
    with pytest.raises(WorkloadError, match=message):
        read_requests(file, 1, Lengths(1, 1), 1.0, seed=0)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_requests(tmp_path / "none", 1, Lengths(1, 1), 1.0, seed=0)
