"""docs/metrics.md lists every metric of the services with its type, labels and text."""

from collections import Counter
from types import SimpleNamespace as Stub

import detok_service.metrics
import engine_worker.keeper.metrics
import engine_worker.ringside.metrics
import gateway.metrics
import router.metrics
from gateway.metrics import Counters
from router.api.stats_broadcast import StatsBroadcast
from router.requests.registry import RequestCounters, Requests
from router.requests.suspects import Suspects
from sluice.telemetry.measures import Histogram
from sluice.telemetry.probes import Startup
from tests.fakes.admission import make_admission
from tests.fakes.engine import EngineBench
from tests.fakes.metrics_page import documented

INBOX = Stub(malformed=0, refused=0, gaps=0)


def shown(metrics) -> list[tuple[str, str, tuple[str, ...], str]]:
    return [
        (
            metric.name + ("_total" if metric.type == "counter" else ""),
            metric.type,
            tuple(getattr(metric, "_labelnames", ())),
            metric.documentation,
        )
        for metric in metrics
    ]


def test_engine():
    bench = EngineBench()
    metrics = engine_worker.ringside.metrics
    running = metrics.read(bench.engine, None, INBOX, bench.mailbox, bench.outbox, None)
    assert shown([*metrics.start(Startup()), *running]) == documented("sluice_engine_")


async def test_router():
    metrics, peers = router.metrics, Stub(all=[], unknown=0)
    ring = Stub(
        counters=RequestCounters(),
        requests=Requests(1),
        admission=make_admission(1, 1, 1),
        membership=Stub(engines=peers, detokenizers=peers),
        inbox=INBOX,
        dispatcher=Stub(late_rows=0, between_attempts=0),
        serving=Stub(version="", count=lambda _: 0),
        suspects=Suspects(1.0),
    )
    access = Stub(refused={}, handshakes=Stub(begun=0, used=0), reloads=Stub(counts={}))
    assert shown(metrics.read(ring, StatsBroadcast(), access, None)) == documented("sluice_router_")


def test_detokenizer():
    service = Stub(
        streams=0,
        max_streams=1,
        backlog=0,
        waiting=0,
        decode_loop=Stub(tokens=0, unknown_rows=0, stale_opens=0, failed=Counter(), dropped=0),
        gaps=0,
        draining_since=None,
        delay=Histogram((1.0,)),
    )
    assert shown(detok_service.metrics.read(service, INBOX)) == documented("sluice_detok_")


def test_gateway():
    assert shown(gateway.metrics.read(Counters(), Stub(used=0, refused=0))) == documented("sluice_gateway_")


def test_keeper():
    keeper = Stub(answers=Counter(), read=Counter(), refused=0)
    assert shown(engine_worker.keeper.metrics.read(keeper, None)) == documented("sluice_keeper_")


def test_names_follow_the_conventions():
    for name, kind, _, text in documented("sluice_"):
        assert name.endswith("_total") == (kind == "counter"), name
        assert "milli" not in name
        assert text.endswith(".")
