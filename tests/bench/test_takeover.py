import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from bench.catalog import TOPICS
from bench.deaths import evicting
from bench.deaths.requests import StreamRequest
from bench.harness.pool_files import NOT_USED
from bench.takeover import rings
from bench.takeover.rings import WatchedStream
from bench.takeover.takeover_page import section
from tests.fakes.measurements import RESULTS
from tests.fakes.measurements_under_stress import deaths_result, roles_result, takeover_result

REQUEST = StreamRequest("greedy", [1], {})


def watched(monkeypatch, chunks, times):
    """A stream with chunks of these numbers of tokens at these times; the first time is that of the call."""
    clock = iter(times)
    monkeypatch.setattr(rings, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    async def read(client, request, on_chunk):
        for count in chunks:
            await asyncio.sleep(0)
            on_chunk(SimpleNamespace(token_count=count))
        return SimpleNamespace(faults=("Unavailable: gone",))

    monkeypatch.setattr(rings, "read_stream", read)
    return WatchedStream(None, REQUEST)


async def test_gaps_are_those_whose_second_delta_arrived_in_the_period(monkeypatch):
    stream = watched(monkeypatch, [1, 0, 2, 1, 1], [0.0, 1.0, 2.0, 5.0, 6.0])
    await stream.task
    assert stream.first_token == 1.0
    assert stream.tokens == 5
    assert stream.gaps(1.5) == [1.0, 3.0, 1.0]
    # A pause that began before the strike counts if it ended after it.
    assert stream.gaps(3.0) == [3.0, 1.0]
    assert stream.gaps(3.0, 5.0) == [3.0]


async def test_a_stream_is_awaited_until_it_has_the_tokens_and_an_early_end_is_an_error(monkeypatch):
    stream = watched(monkeypatch, [2, 2], [0.0, 1.0, 2.0])
    await stream.until(3)
    assert stream.tokens == 4
    with pytest.raises(RuntimeError, match="ended after 4 tokens, before 9: Unavailable: gone"):
        await stream.until(9)


def test_the_answers_count_differences_and_compare_the_pauses_of_the_longest_prompt():
    result = takeover_result()
    sameness, before, after, copies = section(result).answers
    assert sameness == "**0 of 80 streams** failed or differed, 0 in bits of log-probabilities."
    assert "7,500 tokens pauses for 40.5 s (p50) and **41.0 s** (p99)" in before
    assert "0.60 s (p50) and **0.70 s** (p99; goal: at most 1)" in after
    assert "fetched 4,000 blocks and adopted 0" in copies
    wrong = replace(result.runs[0], difference="text", same_bits=False)
    changed = section(replace(result, runs=[wrong, *result.runs[1:]]))
    assert changed.answers[0].startswith("**1 of 80 streams** failed or differed, 1 in bits")
    assert [table.rows[0][-1] for table in changed.tables] == ["1", "0", "0", "0"]


@pytest.mark.parametrize("name", ["takeover", "roles", "pool_files"])
def test_the_page_says_so_if_the_engines_had_no_pool_files(name):
    result = RESULTS[name]()
    assert NOT_USED not in TOPICS[name].section(result).answers
    assert TOPICS[name].section(replace(result, in_files=False)).answers[-1] == NOT_USED


def test_the_page_of_deaths_says_so_if_the_engines_had_no_pool_files():
    result = RESULTS["deaths"]()
    assert not any(NOT_USED in answer for answer in TOPICS["deaths"].section(result).answers)
    without = replace(result, with_files=replace(result.with_files, in_files=False))
    assert any(NOT_USED in answer for answer in TOPICS["deaths"].section(without).answers)


def test_deaths_have_a_column_with_pool_files():
    result = RESULTS["deaths"]()
    slower = replace(result, with_files=replace(result.with_files, stall=[9.0]))
    pauses, _ = TOPICS["deaths"].section(slower).tables
    assert list(pauses.columns) == ["ms", "undisturbed", "services die", "with pool files"]
    assert [row[-1] for row in pauses.rows][2:] == ["9,000", "9,000"]
    assert [row[2] for row in pauses.rows][3] != "9,000"


def test_one_side_alone_is_a_table_of_its_own():
    result = takeover_result()
    alone = replace(result, plan=replace(result.plan, kv=("off",)), runs=result.of(kv="off"))
    found = section(alone)
    assert len(found.answers) == 2
    assert all(len(row) == len(table.columns) == 5 for table in found.tables for row in table.rows)


def test_the_ratio_of_roles_is_that_of_the_99th_percentiles():
    together, apart = roles_result().waits
    assert together.ratio == pytest.approx(0.892 / 0.1198)
    assert apart.ratio == pytest.approx(0.1492 / 0.1198)


def test_a_run_with_evictions_is_right_only_if_files_were_used_and_are_gone():
    right = evicting.EvictingResult(deaths_result(), 3, 4, ["/dev/shm/ring"], [])
    assert right.faults == []
    assert replace(right, adopted=0).faults == ["no block was adopted"]
    assert replace(right, fetched=0).faults == ["no block was fetched"]
    assert replace(right, folders=[]).faults == ["the engines have no kv_folder"]
    assert replace(right, left=["/dev/shm/ring"]).faults == ["left behind: /dev/shm/ring"]
    wrong = replace(right, kills=replace(deaths_result(), failed=1, wrong=2, faults=["greedy: text"]))
    assert wrong.faults == ["greedy: text", "1 streams failed, 2 differ"]


def test_requests_with_evictions_share_beginnings_and_fit_into_the_model():
    requests = evicting.requests(evicting.PLAN)
    beginnings = {request.prompt[: evicting.SHARED_CHARACTERS] for request in requests}
    assert len(beginnings) == evicting.SHARED_PROMPTS
    assert len({request.prompt for request in requests}) > evicting.SHARED_PROMPTS


def test_the_cost_of_filing_is_a_share_of_the_work_on_a_block():
    filed, *_ = TOPICS["pool_files"].section(RESULTS["pool_files"]()).answers
    # 100 of 32 · 800 µs.
    assert "This is **0.39%** of the CPU time of generation (SmolLM2, OpenVINO; limit: 0.5%)" in filed
