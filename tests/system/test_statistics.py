"""Statistics of a real ring: every step and request of a known run, the statistics callback, and Prometheus metrics."""

import json
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice import Client
from sluice.client import DeadlineExceeded
from sluice.v1 import admin_pb2 as pb
from tests.fakes.metrics_page import documented
from tests.fakes.ports import start_with_metrics
from tests.fakes.processes import wait_until

PATIENCE = 300.0
PROMPT = list(range(100, 150))
BLOCK = 16
TOKENS = 12
SERVICES = ("router", "engine", "detok")
ENDED = pb.REQUEST_STAGE_ENDED


@pytest.fixture(scope="module")
def callback_file(tmp_path_factory):
    return tmp_path_factory.mktemp("callback") / "statistics.jsonl"


@pytest.fixture(scope="module")
def ring(callback_file):
    """A ring that no other test uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STATS_FILE", str(callback_file))
        settings = {"tokens_per_block": BLOCK, "stats_callback": "tests.fakes.stats_file:write"}
        ring = start_with_metrics(1, 1, engine_args=settings)
    try:
        yield ring
        ring.stop()
    finally:
        ring.kill()


@pytest.fixture(scope="module")
def run(ring):
    """The StreamSteps reports of three sequential requests with the same prompt, the last with two outputs."""
    steps, requests = [], []
    with Client(ring.address, timeout=PATIENCE) as client, client.stream_steps(timeout=PATIENCE) as responses:
        for i, n in enumerate((1, 1, 2)):
            client.generate(PROMPT, request_id=f"run-{i}", max_tokens=TOKENS, temperature=0.0, ignore_eos=True, n=n)
        while sum(request.stage == ENDED for request in requests) < 3:
            response = next(responses)
            steps += response.steps
            requests += response.requests
    return steps, requests


def test_every_step_is_reported_once(run):
    steps, _ = run
    assert [step.iteration for step in steps] == list(range(steps[0].iteration, steps[-1].iteration + 1))
    assert {step.engine_id for step in steps} == {"engine-0"}
    ends = [step.time.ToNanoseconds() for step in steps]
    assert ends == sorted(ends)
    for step in steps:
        assert step.step_time.ToNanoseconds() > 0
        assert step.scheduled_requests == step.context_requests + step.generation_requests > 0
        assert step.max_kv_blocks == step.free_kv_blocks + step.used_kv_blocks
        assert (step.tokens_per_kv_block, step.paused_requests, step.draining) == (BLOCK, 0, False)
        assert step.max_requests >= step.active_requests
    assert steps[0].used_kv_blocks == -(-(len(PROMPT)) // BLOCK)
    assert (steps[-1].active_requests, steps[-1].used_kv_blocks, steps[-1].queued_requests) == (0, 0, 0)
    assert max(step.tokens_per_second for step in steps) > 0


def test_steps_and_requests_add_up(run):
    steps, requests = run
    ended = [request for request in requests if request.stage == ENDED]
    assert [request.request_id for request in ended] == ["run-0", "run-1", "run-2"]
    assert [request.prompt_tokens for request in ended] == [len(PROMPT)] * 3
    assert [request.generated_tokens for request in ended] == [TOKENS, TOKENS, 2 * TOKENS]
    cached = [request.cached_tokens for request in ended]
    assert cached == [0, 48, 48]
    # Both outputs of the last request share one context, from which the first token of each is sampled.
    contexts = sum(step.total_context_tokens for step in steps)
    assert contexts == 3 * len(PROMPT) - sum(cached)
    assert sum(step.generation_requests for step in steps) == 4 * (TOKENS - 1)
    assert steps[-1].prefix_cache_hit_ratio == pytest.approx(sum(cached) / (3 * len(PROMPT)))


def test_requests_are_reported_with_consistent_times_and_blocks(run):
    _, requests = run
    for request in requests:
        moments = [
            getattr(request, name).ToNanoseconds()
            for name in ("arrival", "first_scheduled", "first_token", "last_token")
            if request.HasField(name)
        ]
        assert moments == sorted(moments)
        assert request.pauses == 0
    first, second, _ = (request for request in requests if request.stage == ENDED)
    blocks = -(-(len(PROMPT) + TOKENS) // BLOCK)
    assert (first.blocks_allocated, first.blocks_reused, first.blocks_missed) == (blocks, 0, len(PROMPT) // BLOCK)
    assert (second.blocks_allocated, second.blocks_reused, second.blocks_missed) == (blocks - 3, 3, 0)
    waited = first.first_scheduled.ToNanoseconds() - first.arrival.ToNanoseconds()
    assert first.queued.ToNanoseconds() == pytest.approx(waited, abs=1000)


def test_an_idle_ring_reports_nothing(ring, run):
    with Client(ring.address) as client, client.stream_steps(timeout=1.5) as responses:
        received = []
        with pytest.raises(DeadlineExceeded):
            received += responses
    assert received == []


def test_the_callback_receives_the_same_statistics(run, callback_file):
    steps, _ = run
    names = {"run-0", "run-1", "run-2"}

    def ended() -> set[str]:
        return {report["request_id"] for report in reports(callback_file) if report.get("stage") == "ended"}

    assert wait_until(lambda: ended() >= names)
    by_iteration = {report["iteration"]: report for report in reports(callback_file) if report["type"] == "step"}
    for step in steps:
        assert by_iteration[step.iteration]["total_context_tokens"] == step.total_context_tokens
        assert by_iteration[step.iteration]["generation_requests"] == step.generation_requests


def reports(file) -> list[dict]:
    # The last line may be incomplete.
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Samples by name and labels, and the key ("families", name, type) for each metric of ours."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    names = {(family.name, family.type) for family in families if family.name.startswith("sluice_")}
    return samples | {("families", name, kind): 1.0 for name, kind in names}


def test_metrics_count_the_run_and_are_all_documented(ring, run):
    steps, _ = run
    router, engine, detok = (scrape(ring.plan.metrics_port + i) for i in range(3))
    for service, samples in zip(SERVICES, (router, engine, detok), strict=True):
        listed = {(name.removesuffix("_total"), kind) for name, kind, *_ in documented(f"sluice_{service}_")}
        assert {(name, kind) for key, *rest in samples if key == "families" for name, kind in [rest]} == listed
    assert router["sluice_router_requests_total", "LENGTH", "OK"] >= 3
    assert router["sluice_router_peers_usable", "engine"] == router["sluice_router_peers_usable", "detokenizer"] == 1
    assert router["sluice_router_inter_token_seconds_count",] >= 4 * (TOKENS - 1)
    assert engine["sluice_engine_step_seconds_count",] == steps[-1].iteration
    assert engine["sluice_engine_kv_blocks", "used", "device"] == 0
    assert engine["sluice_engine_cached_tokens_total",] >= 96
    assert engine["sluice_engine_stats_callback_errors_total",] == 0
    assert detok["sluice_detok_tokens_total",] == engine["sluice_engine_generated_tokens_total",]
    assert detok["sluice_detok_streams",] == 0
