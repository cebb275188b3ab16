"""The requests of a load."""

import pytest

from sluice.loadgen.workload import Lengths, Request, WorkloadError, random_requests, read_requests


def test_random_requests_have_lengths_within_the_spread():
    requests = random_requests(200, Lengths(100, 50, spread=0.5), 2.0, seed=1)
    words, outputs = [len(request.prompt.split()) for request in requests], [request.max_tokens for request in requests]
    assert (min(words), max(words)) == (25, 75)
    assert (min(outputs), max(outputs)) == (25, 75)
    assert len({request.prompt for request in requests}) == len(requests)


def test_the_same_seed_gives_the_same_requests():
    first, same, different = (random_requests(5, Lengths(20, 10, 0.3), 1.0, seed) for seed in (7, 7, 8))
    assert first == same != different


def test_variants_have_other_words_and_the_same_lengths():
    first, second = (random_requests(5, Lengths(20, 10, 0.3), 1.0, 7, variant) for variant in (0, 1))
    assert {request.prompt for request in first}.isdisjoint(request.prompt for request in second)
    sizes = [
        [(len(request.prompt.split()), request.max_tokens) for request in requests] for requests in (first, second)
    ]
    assert sizes[0] == sizes[1]


def test_without_spread_all_lengths_are_equal():
    requests = random_requests(3, Lengths(10, 4), 1.0, seed=0)
    assert {(len(request.prompt.split()), request.max_tokens) for request in requests} == {(10, 4)}


def test_a_file_is_repeated_until_there_are_enough(tmp_path):
    file = tmp_path / "load.jsonl"
    file.write_text('{"prompt": "a b", "output_tokens": 3}\n\n{"prompt_tokens": 8}\n')
    requests = read_requests(file, 3, Lengths(100, 50), 2.0, seed=0)
    assert requests[0] == requests[2] == Request("a b", 3)
    assert len(requests[1].prompt.split()) == 4
    assert requests[1].max_tokens == 50


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: not a JSON object"),
        ('{"text": "a"}', "line 1: unknown fields text"),
        ('{"output_tokens": 3}', "give either prompt or prompt_tokens"),
        ('{"prompt": "a", "prompt_tokens": 3}', "give either prompt or prompt_tokens"),
        ('{"prompt": 1}', "prompt is not a string"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens must be an integer from 1 to 1048576 \\(got 0\\)"),
        ('{"prompt_tokens": true}', "prompt_tokens must be an integer .* \\(got True\\)"),
        ("", "has no requests"),
    ],
)
def test_invalid_lines_are_refused(tmp_path, line, message):
    file = tmp_path / "load.jsonl"
    file.write_text(line)
    with pytest.raises(WorkloadError, match=message):
        read_requests(file, 1, Lengths(1, 1), 1.0, seed=0)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_requests(tmp_path / "none", 1, Lengths(1, 1), 1.0, seed=0)
