"""Beam search on a real ring: the example of docs/beams.md, streams, refusals, and an engine that is killed."""

import math
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from sluice.client import InvalidRequest
from sluice.executor import GenerationExecutor, SamplingParams
from sluice.launch import Ring
from tests.fakes.processes import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "beams.md"
SEARCH = {"n": 3, "max_tokens": 40, "token_ids": True, "logprobs": 2, "beam_search": {"width": 4}}


@pytest.fixture(scope="module")
def ring():
    with Ring(engines=2, detokenizers=1, router_args={"peer_timeout": 5.0}) as ring:
        yield ring


@pytest.mark.long
def test_the_example_of_the_page_works(client):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # `exec` is safe here: the page is part of this repository.
    names = {"client": client}
    exec(code, names)
    best, second = names["found"].outputs
    scores = [output.cumulative_logprob / len(output.token_ids) ** 0.5 for output in (best, second)]
    assert scores == sorted(scores, reverse=True)


def test_a_stream_sends_each_output_in_one_chunk(client):
    result = client.generate("def f(x):\n", **SEARCH)
    stream = client.stream("def f(x):\n", **SEARCH)
    texts, sums, counts = ["", "", ""], {}, [0, 0, 0]
    for chunk in stream:
        texts[chunk.index] += chunk.text
        counts[chunk.index] += chunk.token_count > 0
        if chunk.finish_reason is not None:
            sums[chunk.index] = chunk.cumulative_logprob
    assert texts == [output.text for output in result.outputs]
    # Clients that repeat a broken search rely on this.
    assert counts == [1, 1, 1]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    for output in result.outputs:
        total = sum(entry.logprob for entry in output.logprobs)
        assert (sums[output.index], total) == pytest.approx((output.cumulative_logprob,) * 2, abs=1e-4)
        assert all(len(entry.top) == 2 and entry.top[0].logprob >= entry.logprob for entry in output.logprobs)
    assert result.usage.completion_tokens == sum(len(output.token_ids) for output in result.outputs)


def test_searches_and_sampled_requests_do_not_affect_each_other(client):
    alone = client.generate("import os\n", seed=3, max_tokens=60).text
    search = client.generate("def f(x):\n", **SEARCH)
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(client.generate("import os\n", seed=3, max_tokens=60).text))
    thread.start()
    concurrent = client.generate("def f(x):\n", **SEARCH)
    thread.join()
    assert texts == [alone]
    assert [output.token_ids for output in concurrent.outputs] == [output.token_ids for output in search.outputs]


def test_a_parameter_that_cannot_be_combined_with_beam_search_is_named(client):
    with pytest.raises(InvalidRequest, match=r"spec\.sampling\.temperature.*0\.7"):
        client.generate("x", temperature=0.7, beam_search={"width": 2})


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_search_survives_the_death_of_its_engine(ring, client):
    options = SEARCH | {"max_tokens": 900, "ignore_eos": True, "beam_search": {"width": 4, "exhaustive": True}}
    expected = client.generate("# long\nimport os\n", **options)
    assert wait_until(lambda: busy_engines(client) == [])
    results = []
    thread = threading.Thread(target=lambda: results.append(client.generate("# long\nimport os\n", **options)))
    thread.start()
    busy: list[str] = []

    def has_begun() -> bool:
        busy[:] = busy_engines(client)
        return bool(busy)

    # Heartbeats report it a fraction of a second after the search has begun.
    assert wait_until(has_begun)
    (engine,) = busy
    os.kill(ring.pids[engine], signal.SIGKILL)
    thread.join()
    for before, after in zip(expected.outputs, results[0].outputs, strict=True):
        assert (before.token_ids, before.text) == (after.token_ids, after.text)
        assert math.isclose(before.cumulative_logprob, after.cumulative_logprob, abs_tol=1e-2)


def busy_engines(client) -> list[str]:
    """Ids of the engines that have requests."""
    return [engine.engine_id for engine in client.stats().engines if engine.active_requests]


@pytest.mark.long
def test_the_executor_searches(ring):
    with GenerationExecutor.connect(ring.address) as executor:
        params = SamplingParams(use_beam_search=True, n=2, best_of=4, max_tokens=12, early_stopping=2)
        result = executor.generate("import os\n", sampling_params=params)
    assert len(result.outputs) == 2
    best, second = (output.cumulative_logprob / len(output.token_ids) for output in result.outputs)
    assert best >= second
