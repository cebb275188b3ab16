"""A router's Prometheus metrics after known requests."""

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.app import RouterApp
from router.errors import RequestError
from sluice.telemetry.metrics import registry_of
from tests.fakes.admission import make_admission
from tests.fakes.ring_scripts import hang
from tests.fakes.status import serve_metrics
from tests.router.conftest import refused, text_spec

TOKENS = 24
"""Tokens per output of the fake engine."""


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[f"sluice_router_{name}", tuple(sorted(labels.items()))]


def scrape(router: RouterApp) -> Scrape:
    server = serve_metrics(registry_of(router._read_metrics))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            return Scrape(answer.read().decode())
    finally:
        server.close()


async def test_requests_and_tokens_by_outcome(client, ring):
    scrape_before = scrape(client.router)
    assert scrape_before("requests_open") == scrape_before("queue_seconds_count") == 0
    assert scrape_before("peers_usable", kind="engine") == scrape_before("peers_usable", kind="detokenizer") == 1
    await client.events(text_spec(request_id="a"))
    await client.generate(text_spec(n=2))
    await refused(client.generate(text_spec(n=1000)))
    await client.until(lambda: not client.router.ring.requests.open)
    scrape_after = scrape(client.router)
    assert scrape_after("requests_total", outcome="LENGTH", status="OK") == 2
    assert scrape_after("requests_total", outcome="INVALID_ARGUMENT", status="INVALID_ARGUMENT") == 1
    assert scrape_after("completion_tokens_total") == 3 * TOKENS
    prompts = sum(len(call.submit.prompt) for call in ring.calls)
    assert scrape_after("prompt_tokens_total") == prompts
    assert scrape_after("cached_tokens_total") == sum(len(call.submit.prompt) // 2 for call in ring.calls)
    assert (
        scrape_after("first_token_seconds_count")
        == scrape_after("request_seconds_count")
        == scrape_after("queue_seconds_count")
        == 2
    )
    # The first token of each of the three sequences has no predecessor.
    assert scrape_after("inter_token_seconds_count") == 3 * (TOKENS - 1)
    assert scrape_after("inter_token_seconds_bucket", le="+Inf") == scrape_after("inter_token_seconds_count")
    assert scrape_after("requests_on_ring") == scrape_after("permits") == 0


async def test_lost_steps_and_subscribers_are_counted(client, ring):
    assert scrape(client.router)("steps_listeners") == 0
    with client.router._stats_broadcast.subscribe():
        assert scrape(client.router)("steps_listeners") == 1
    assert scrape(client.router)("steps_lost_total") == 0


async def test_refused_requests_are_counted():
    admission = make_admission(0, 0, 0)
    for _ in range(2):
        with pytest.raises(RequestError):
            await admission.acquire(2, 1)
    assert admission.refused == 2


async def test_a_cancelled_call_has_its_own_outcome(client, ring):
    ring.script = hang
    call = client.stream(text_spec())
    await client.until(lambda: len(ring.calls) == 1)
    call.cancel()
    await client.until(lambda: not client.router.ring.requests.open)
    assert scrape(client.router)("requests_total", outcome="CANCELLED", status="CANCELLED") == 1
