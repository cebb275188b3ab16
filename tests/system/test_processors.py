"""A real ring with the logits processor of docs/processors.md, and with bad words, n-gram rules and best_of."""

import itertools
from functools import partial
from types import SimpleNamespace

import pytest

from sluice import Client
from sluice.client import InvalidRequest
from sluice.launch import Ring
from sluice.launch.local_ring import RingError
from tests.fakes.processors_page import calls, example

PROMPT = "def fibonacci(n):\n    "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's working directory, with the processor and the engine's settings."""
    folder = tmp_path_factory.mktemp("user")
    module, settings = example()
    (folder / "digits.py").write_text(module)
    (folder / "engine.yaml").write_text(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def client(folder):
    with (
        Ring(engines=1, detokenizers=1, engine_args={"config": folder / "engine.yaml"}) as ring,
        Client(ring.address) as client,
    ):
        yield client


def greedy(client, prompt, **options):
    return client.generate(prompt, temperature=0, **options)


def without_words(client, prompt, bad_words, **options):
    return greedy(client, prompt, **options)


@pytest.mark.long
def test_the_calls_of_the_page_work(client):
    bad_words, processed = calls()
    # `eval` is safe here: the page is part of this repository.
    plain, banned = (
        eval(bad_words, {"client": SimpleNamespace(generate=partial(call, client))}) for call in (without_words, greedy)
    )
    assert "string" in plain.text
    assert "string" not in banned.text
    assert "return" not in banned.text
    text = eval(processed, {"client": client}).text
    assert text.isdigit()
    assert len(text) == 8
    assert all(first != second for first, second in itertools.pairwise(text))


def test_streams_with_and_without_a_processor_do_not_affect_each_other(client):
    plain = client.generate(PROMPT, max_tokens=24, temperature=0).text
    digits = [client.stream(PROMPT, max_tokens=12, seed=i, n=2, logits_processors=["digits"]) for i in range(4)]
    without = [client.stream(PROMPT, max_tokens=24, temperature=0) for _ in range(4)]
    for stream in digits:
        texts = ["", ""]
        for chunk in stream:
            texts[chunk.index] += chunk.text
        assert all(text.isdigit() and len(text) == 12 for text in texts)
        assert texts[0] != texts[1]
    assert ["".join(chunk.text for chunk in stream) for stream in without] == [plain] * 4


def test_an_unknown_processor_is_refused_with_the_names_of_the_known_ones(client):
    with pytest.raises(InvalidRequest, match="must be one of: digits") as caught:
        client.generate(PROMPT, logits_processors=["digits", "letters"])
    assert [violation.field for violation in caught.value.violations] == ["spec.sampling.logits_processors[1]"]


@pytest.mark.long
def test_a_processor_that_cannot_be_loaded_fails_the_start_with_the_reason(folder):
    arguments = {"logits_processor_batched": "digits:missing"}
    with pytest.raises(RingError, match=r"logits_processor_batched: 'digits:missing' cannot be used: AttributeError"):
        Ring(engines=1, detokenizers=1, engine_args=arguments).start()


def test_bad_words_do_not_occur(client):
    plain = client.generate(PROMPT, max_tokens=40, temperature=0).text
    words = [word for word in dict.fromkeys(plain.split()) if word.isalpha() and len(word) > 3][:3]
    assert words
    text = client.generate(PROMPT, max_tokens=40, temperature=0, bad_words=words).text
    assert text != plain
    assert not set(words) & set(text.split())


def test_no_ngram_occurs_twice(client):
    plain, without_repeats = (
        client.generate(PROMPT, max_tokens=60, temperature=0, token_ids=True, **options).outputs[0].token_ids
        for options in ({}, {"no_repeat_ngram_size": 2})
    )
    assert len(set(itertools.pairwise(plain))) < 59
    assert len(set(itertools.pairwise(without_repeats))) == 59


@pytest.mark.long
def test_best_of_returns_the_most_likely_outputs(client):
    several = client.generate(PROMPT, n=5, seed=3, max_tokens=12, logprobs=0)
    best = client.generate(PROMPT, n=2, best_of=5, seed=3, max_tokens=12)
    expected = sorted(several.outputs, key=lambda output: -output.cumulative_logprob)[:2]
    assert [output.text for output in best.outputs] == [output.text for output in expected]
    assert [output.index for output in best.outputs] == [0, 1]
    assert best.usage == several.usage
