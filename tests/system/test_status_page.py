"""The status pages of a real ring, as JSON and in a browser, also while services are frozen."""

import contextlib
import json
import os
import re
import signal
import urllib.request

import pytest

from sluice import Client
from tests.fakes.browser import CHROMIUM, browser
from tests.fakes.ports import start_with_metrics
from tests.fakes.processes import wait_until

ROUTER, ENGINE, DETOKENIZER = 0, 1, 3
OPENED = "document.querySelectorAll('#engines tbody tr').length === 2"
DARK = "getComputedStyle(document.body).backgroundColor"
MODELS = "[...document.querySelectorAll('#engines tbody tr')].map(row => row.children[10].textContent)"
NO_SCOPE = "[...document.querySelectorAll('th:not([scope])')].length"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT = """[...document.querySelectorAll('.card')]
    .filter(card => card.scrollWidth > card.clientWidth).map(card => card.innerText)"""
# The contrast of each visible text with its background, as defined by WCAG 2.
CONTRASTS = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const part = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = rgb(getComputedStyle(node).backgroundColor);
      if (color.length < 4 || color[3]) return color;
    }
    return [255, 255, 255];
  };
  const contrasts = {};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("script, style")) continue;
    const two = [luminance(rgb(getComputedStyle(node).color)), luminance(behind(node))].sort((a, b) => b - a);
    contrasts[walker.currentNode.data.trim()] = (two[0] + 0.05) / (two[1] + 0.05);
  }
  return contrasts;
})()"""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is missing")


@pytest.fixture(scope="module")
def ring():
    ring = start_with_metrics(2, 1)
    try:
        with Client(ring.address, tenant="search") as client:
            for i in range(3):
                client.generate(list(range(100, 150)), request_id=f"seen-{i}", max_tokens=8, ignore_eos=True)
        yield ring
    finally:
        ring.kill()


@contextlib.contextmanager
def frozen(ring, name: str):
    os.kill(ring.pids[name], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(ring.pids[name], signal.SIGCONT)


def url(ring, service: int) -> str:
    return f"http://127.0.0.1:{ring.plan.metrics_port + service}/"


def status(ring, service: int) -> dict:
    with urllib.request.urlopen(f"{url(ring, service)}status.json", timeout=60) as answer:
        return json.load(answer)


def engines(ring) -> dict[str, dict]:
    return {engine["id"]: engine for engine in status(ring, ROUTER)["report"]["engines"]}


def test_the_page_of_a_router_shows_the_whole_ring(ring):
    assert wait_until(lambda: all(engine["state"] == "serving" for engine in engines(ring).values()))
    page = status(ring, ROUTER)
    assert (page["service"], page["id"], page["model"], page["ready"]) == ("router", "router", "tiny", True)
    report = page["report"]
    assert report["address"] in ring.address
    assert [(engine["id"], engine["state"]) for engine in report["engines"]] == [
        ("engine-0", "serving"),
        ("engine-1", "serving"),
    ]
    versions = {peer["version"] for peer in (*report["engines"], *report["detokenizers"])}
    assert versions == {page["version"]}
    assert wait_until(lambda: any(engine["iteration"] for engine in engines(ring).values()))
    assert [(detok["id"], detok["state"]) for detok in report["detokenizers"]] == [("detok-0", "serving")]
    latest = report["requests"][0]
    assert (latest["id"], latest["tenant"], latest["state"], latest["open"]) == ("seen-2", "search", "LENGTH", False)
    assert (latest["prompt_tokens"], latest["completion_tokens"], latest["attempts"]) == (50, 8, 1)
    assert latest["detokenizer"] == "detok-0"
    assert 0 < latest["first_token_seconds"] < latest["seconds"]
    assert report["router"]["outcomes"] == {"LENGTH": 3}
    assert sum(report["router"]["first_token_seconds"]["counts"]) == 3


def test_the_pages_of_engines_and_detokenizers_show_themselves(ring):
    engine, detokenizer = status(ring, ENGINE), status(ring, DETOKENIZER)
    assert (engine["service"], engine["id"], engine["ready"]) == ("engine", "engine-0", True)
    assert [shown["id"] for shown in engine["report"]["engines"]] == ["engine-0"]
    assert engine["report"]["engines"][0]["max_kv_blocks"] > 0
    assert (detokenizer["service"], detokenizer["id"]) == ("detok", "detok-0")
    assert [shown["id"] for shown in detokenizer["report"]["detokenizers"]] == ["detok-0"]


def test_open_requests_and_their_tenants_are_shown(ring):
    with Client(ring.address, tenant="batch") as client:
        stream = client.stream(list(range(50)), request_id="open", max_tokens=1900, ignore_eos=True)
        reports = []

        def runs() -> bool:
            reports.append(status(ring, ROUTER)["report"])
            return reports[-1]["requests"][0]["state"] == "ON_RING"

        assert wait_until(runs)
        report = reports[-1]
        assert [request["id"] for request in report["requests"] if request["open"]] == ["open"]
        assert report["tenants"] == [{"tenant": "batch", "open": 1, "waiting": 0, "admitted": 1}]
        assert report["router"]["open"] == 1
        stream.close()


def test_a_frozen_engine_is_shown_as_lost_until_it_continues(ring):
    with frozen(ring, "engine-1"):
        assert wait_until(lambda: engines(ring)["engine-1"]["state"] == "lost")
        assert engines(ring)["engine-1"]["heartbeat_age"] > 1.0
        assert wait_until(lambda: engines(ring)["engine-0"]["state"] == "serving")
    assert wait_until(lambda: engines(ring)["engine-1"]["state"] == "serving")


@pytest.fixture(scope="module")
def chromium():
    with browser() as chromium:
        yield chromium


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 920, 360])
def test_the_page_of_a_router_is_readable_in_a_browser(ring, chromium, dark, width):
    page = chromium.page(url(ring, ROUTER), width, dark=dark).wait(OPENED)
    page.wait("document.body.innerText.includes('2 of 2 serving')")
    for expected in (
        "Sluice router",
        "Ready",
        "engine-0",
        "engine-1",
        "detok-0",
        "2 of 2 serving",
        "Tokens per second",
    ):
        assert expected in page.text
    fingerprint = engines(ring)["engine-0"]["model"]
    assert page.run(MODELS) == [f"tiny {fingerprint[:8]}"] * 2
    assert ("seen-2" in page.text, "search" in page.text) == (True, True)
    # In a narrow window the time is below the duration.
    assert ("first token\n" in page.text or "first token\t" in page.text) == (width > 360)
    assert bool(re.search(r"first [\d.]+ m?s", page.text)) == (width == 360)
    assert page.run(DARK) == ("rgb(20, 21, 23)" if dark else "rgb(251, 251, 249)")
    assert page.run(OVERFLOW) == 0
    assert page.run(CUT) == []
    assert page.run(NO_SCOPE) == 0
    contrasts = page.run(CONTRASTS)
    assert len(contrasts) > 30
    assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}
    assert page.console_errors == []


@needs_chromium
@pytest.mark.parametrize(("service", "shown"), [(ENGINE, "KV cache"), (DETOKENIZER, "Streams")])
def test_the_pages_of_engines_and_detokenizers_work_in_a_browser(ring, chromium, service, shown):
    page = chromium.page(url(ring, service)).wait("document.querySelectorAll('#tiles dt').length > 0")
    assert "Ready" in page.text
    assert shown in page.text
    assert page.console_errors == []


@pytest.mark.quick(1)
@needs_chromium
@pytest.mark.parametrize("width", [1280, 920, 360])
def test_the_browser_shows_frozen_services_as_lost(ring, chromium, width):
    page = chromium.page(url(ring, ROUTER), width).wait(OPENED)
    with frozen(ring, "engine-1"):
        page.wait(r"/lost\s+for \d/.test(document.querySelector('#engines').innerText)")
        assert "1 of 2 serving" in page.text
        assert page.run(CUT) == []
    page.wait("!document.querySelector('#engines').innerText.includes('lost')")
    with frozen(ring, "router"):
        page.wait("document.body.innerText.includes('No answer for')")
        assert "Ready" not in page.text
    page.wait("!document.body.innerText.includes('No answer')")
    assert "Ready" in page.text
    assert page.console_errors == []
