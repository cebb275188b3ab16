"""The status page and /status.json of a service, before and after it is ready."""

import json
import re
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from sluice.telemetry.pages import Page, PortOwner
from sluice.telemetry.probes import Health, Startup
from sluice.telemetry.server import StatusServer
from sluice.telemetry.service_status import ProgressBeacon
from sluice.telemetry.status_report import EngineReport, ServiceReport
from sluice.wire.stats import StepStats
from tests.fakes.clock import Clock

OWNER = PortOwner("engine", "engine-0", "tiny")


@pytest.fixture
def startup():
    return Startup()


@pytest.fixture
def server(startup):
    server = StatusServer(Page(CollectorRegistry(), startup, OWNER), "127.0.0.1", 0)
    yield server
    server.close()


def get(server: StatusServer, path: str):
    return urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30)


def status(server: StatusServer) -> dict:
    with get(server, "/status.json") as answer:
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["Cache-Control"] == "no-store"
        return json.load(answer)


def test_the_status_of_a_service_that_is_loading(server, startup):
    startup.report("loading", 43, 100)
    loading = status(server)
    assert (loading["service"], loading["id"], loading["model"]) == ("engine", "engine-0", "tiny")
    assert (loading["live"], loading["ready"]) == (True, False)
    assert (loading["reason"], loading["report"]) == ("loading 43 %", None)


def test_the_status_of_a_service_that_runs_then_stalls(server):
    clock = Clock()
    health = Health(ProgressBeacon(clock), live_stall=120, ready_stall=30, unready=lambda: None)
    described = EngineReport("engine-0", "serving", "ipc:///e").with_stats(StepStats(iteration=7, used_kv_blocks=3))
    report = ServiceReport("ipc:///e", engines=[described])
    server.show(Page(CollectorRegistry(), health, OWNER, lambda: report))
    running = status(server)
    assert (running["live"], running["ready"], running["reason"]) == (True, True, "")
    (engine,) = running["report"]["engines"]
    assert (engine["id"], engine["iteration"], engine["used_kv_blocks"]) == ("engine-0", 7, 3)
    assert running["report"]["router"] is None
    clock.now += 121
    stalled = status(server)
    assert (stalled["live"], stalled["ready"]) == (False, False)
    assert stalled["reason"] == "the loop has not run for 121.0 s"


def test_the_page_loads_nothing_from_other_servers(server):
    with get(server, "/") as answer:
        policy, page = answer.headers["Content-Security-Policy"], answer.read().decode()
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    addresses = set(re.findall(r"\w+://[^\"'`\s]+", page)) - {"http://www.w3.org/2000/svg"}
    assert addresses == set()
    # Values are set as text, never as markup.
    assert "innerHTML" not in page
    assert not re.search(r"<[^>]+\s(style|on\w+)=", page.split("<script>")[0])
