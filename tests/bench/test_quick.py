import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.catalog import TOPICS
from bench.page import load
from bench.takeover.costs import DECODE, PREFILL
from bench.topics.drafters import LOOKUP, MODEL
from bench.topics.guided import GUIDES, PLAIN
from bench.topics.logit_rules import ALL, KINDS
from bench.topics.speculation import EDIT
from engine_worker.formats.rounding_error import BOUND

ROOT = Path(__file__).parents[2]
SERVED = ("ring", "peers", "long_context")
LIKE_PEERS = ("peers_large",)
"""Topics with the same code on a different checkpoint."""
CROWDED = ("overload", "slow_reader", "slow_tensors")
DEADLY = ("deaths", "deaths_by_precision", "restart", "pauses", "takeover", "soak")
"""Topics that are tested in tests/chaos."""
SCHEDULED = ("scheduler", "logit_rules")
FILES = ("roles", "pool_files")
COMPARED = ("policies", "speculation", "lora", "beams", "prompt_logprobs", "gguf", "quantize")

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]


def bench(parts: Sequence[str], out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", *parts, "--quick", "--threads", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in parts:
        assert (out / f"{part}.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "README.md").is_file()
    measured = load(out)
    assert set(measured) == set(parts)
    return {part: part_result.result for part, part_result in measured.items()}


def test_every_part_has_its_quick_bench():
    alone = {"router", "gateway", "cache", "steps", "guided"}
    assert set(TOPICS) == {*alone, *SERVED, *LIKE_PEERS, *SCHEDULED, *COMPARED, *CROWDED, *DEADLY, *FILES}


@pytest.mark.long
def test_quick_through_the_ring_and_beside_transformers(tmp_path):
    results = bench(SERVED, tmp_path)
    (points,) = results["ring"].models
    for point in points.points:
        assert point.alone.tokens_per_second > 0
        assert point.ring.cpu_per_token.keys() == {"router", "engine", "detok", "client"}
        assert point.ring.tokens_per_delta >= 1
    for table in results["peers"].tables:
        alike = [entry.same for entry in table.entries if entry.precision == "float32"]
        assert alike == [table.work.requests] * len(alike)
        assert len([entry for entry in table.entries if entry.is_ours]) >= 2
        assert table.meanwhile.ours > 0
    costs = [results["long_context"].costs(system) for system in results["long_context"].systems]
    assert costs
    assert all(len(of_system) == 2 and min(of_system) > 0 for of_system in costs)


@pytest.mark.long
def test_quick_of_the_router_alone(tmp_path):
    result = bench(["router"], tmp_path)["router"]
    (point,) = result.points
    assert len(point.costs) == result.repeats
    (fast,) = point.fast
    assert fast.tokens == result.rows
    assert 0 < fast.deltas <= fast.tokens
    assert fast.router_seconds > 0


@pytest.mark.long
def test_quick_of_the_gateway_alone(tmp_path):
    result = bench(["gateway"], tmp_path)["gateway"]
    (point,) = result.points
    (cost,) = point.costs
    assert cost.first_chunk_p50 > 0
    assert cost.gap_p50 <= cost.gap_p99


@pytest.mark.long
def test_quick_of_the_scheduler(tmp_path):
    results = bench(SCHEDULED, tmp_path)
    assert all(0 < point.costs.schedule < point.costs.whole for point in results["scheduler"].points)
    assert {point.kind for point in results["logit_rules"].points} == {*KINDS, ALL}


@pytest.mark.long
def test_quick_of_what_is_compared_on_one_engine(tmp_path):
    results = bench(COMPARED, tmp_path)
    plenty, scarce = results["policies"].outcomes
    assert all(len(entry.lives) == results["policies"].requests for entry in (*plenty.entries, *scarce.entries))
    packed, _, static = plenty.entries
    assert packed.steps < static.steps
    packed, no_evict, _ = scarce.entries
    assert packed.steps < no_evict.steps
    quality = {point.side: point.divergence for point in results["gguf"].points if point.divergence is not None}
    assert quality["as stored, activations exact"] < 1e-5 < quality["as stored"] < quality["int4"]
    losses = {loss.side: loss for loss in results["quantize"].losses}
    assert 0 < losses["int8"].divergence < losses["int4"].divergence
    assert losses["int8"].error < BOUND < min(losses["fp8, GPU"].error, losses["int4"].error)
    for entry in results["policies"].modes:
        assert len(entry.episode.streams) == results["policies"].long.streams
        assert all(arrival.came < arrival.first_token for arrival in entry.episode.newcomers)
    assert all(point.plain > 0 for point in results["speculation"].points)
    assert results["speculation"].of(EDIT)[0].steps_saved > 0
    assert {point.drafter for point in results["speculation"].drafters} == {LOOKUP, MODEL}
    assert all(point.unused > 0 and min(point.speeds) > 0 for point in results["lora"].points)
    assert all(point.sampled > 0 and point.speed > 0 for point in results["beams"].points)
    assert all(cost > 0 for point in results["prompt_logprobs"].points for cost in point.cost)


@pytest.mark.long
def test_quick_of_guides(tmp_path):
    result = bench(["guided"], tmp_path)["guided"]
    assert {point.guide for point in result.points} == {PLAIN, *GUIDES}
    assert all(wait.milliseconds > 0 for wait in result.waits)


@pytest.mark.long
def test_quick_of_the_parts_of_a_step(tmp_path):
    result = bench(["steps"], tmp_path)["steps"]
    assert len(result.profiles) == 3 * len(result.works) == 9
    for profile in result.profiles:
        assert min(profile.parts.values()) > 0
        assert 0 < profile.own < sum(profile.parts.values())


@pytest.mark.long
def test_quick_of_the_cache(tmp_path):
    result = bench(["cache"], tmp_path)["cache"]
    assert [[0 < side.share < 1 for side in point.sides] for point in result.reused] == [[False, True]]
    (point,) = result.retained
    assert [side.share for side in point.sides] == [0.0, 1.0, 0.0]
    (point,) = result.tiered
    assert point.same == point.outputs
    assert point.saved >= 0.8


@pytest.mark.long
def test_quick_of_overload_and_slow_readers(tmp_path):
    results = bench(CROWDED, tmp_path)
    for burst in results["overload"].bursts:
        assert burst.served + burst.refused == burst.requests
        assert burst.unexplained == {}
        assert burst.served >= results["overload"].max_live
        assert burst.told_when == len(burst.router) == len(burst.client) == burst.refused
    assert [burst.connections for burst in results["overload"].bursts] == [1, 1, 8]
    assert results["overload"].retried.errors == {}
    shared = results["overload"].tenants
    count = shared.plan.rounds * shared.plan.requests
    assert [len(load.first_token) for load in (shared.alone, shared.flooded)] == [count, count]
    for slow in (results["slow_reader"], results["slow_tensors"]):
        assert slow.read_later == slow.slow_tokens
        assert all(speed > 0 for speed in (*slow.without, *slow.beside))


@pytest.mark.long
def test_quick_of_pool_files_and_roles(tmp_path):
    results = bench(FILES, tmp_path)
    assert [point.work for point in results["pool_files"].points] == [PREFILL, DECODE]
    for point in results["pool_files"].points:
        assert point.cpu > 0
        assert len(point.added) == results["pool_files"].plan.repeats
    copies = results["pool_files"].copies
    assert min(copies.fresh, copies.again, copies.nothing, copies.adoption) > 0
    for waits in results["roles"].waits:
        assert waits.ratio > 0
        assert waits.first_token
        assert waits.wrong == 0


@pytest.mark.long
def test_the_results_of_other_topics_are_written_when_one_fails(tmp_path):
    code = (
        "import bench.__main__ as main\n"
        "def broken(plan, folder, step):\n"
        "    step('half', {'half': 1})\n"
        "    raise RuntimeError('no luck')\n"
        "main.TOPICS = {**main.TOPICS, 'cache': main.TOPICS['cache']._replace(measure=broken)}\n"
        f"main.main(['cache', 'scheduler', '--quick', '--out', {str(tmp_path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 1
    assert "no luck" in done.stdout
    assert set(load(tmp_path)) == {"scheduler"}
    assert json.loads((tmp_path / "cache.partial").read_bytes())["result"] == {"half": 1}
    assert "scheduler.png" in (tmp_path / "README.md").read_text(encoding="utf-8")
