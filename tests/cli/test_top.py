"""`sluice top`: the command with --once, and the screen, driven by textual's Pilot."""

import builtins
import json
import socket
import time
from itertools import count

import pytest
from textual.widgets import DataTable, Sparkline, Static
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.top import panels
from sluice.top.app import TopApp
from sluice.top.snapshot import Answer, DetokenizerRow, EngineRow, RequestRow, RouterRow, Snapshot, TenantRow, combine
from sluice.v1 import admin_pb2 as pb
from tests.fakes.processes import LIMIT

SERVING, LOST = pb.PEER_STATE_SERVING, pb.PEER_STATE_LOST


REQUEST_ID = "0197a1c2-3b4d-7e5f-8a9b-0c1d2e3f4a5b"


def request(name: str, is_open: bool, seconds: float, tokens: int) -> RequestRow:
    state, first = ("on_ring", None) if is_open else ("eos", 0.25)
    return RequestRow(name, "search", state, is_open, seconds, 9, 3, tokens, 1, "r", "e", "d", first)


def snapshot(turn: int) -> Snapshot:
    return Snapshot(
        float(turn),
        ["tiny"],
        [RouterRow("a:1", "serving", "", "router-0", open=2), RouterRow("b:1", "no answer", "refused")],
        [
            EngineRow(
                "engine-0",
                "serving",
                active=1,
                batch=2,
                max_batch=64,
                kv_blocks_used=1,
                kv_blocks=4,
                tokens_per_second=100.0 + turn,
            ),
            EngineRow("engine-1", "serving", active=5, tokens_per_second=50.0),
            EngineRow("engine-2", "lost", active=7),
        ],
        [DetokenizerRow("detok-0", "serving", streams=4)],
        [TenantRow("search", 2, 1, 1), TenantRow("", 1, 0, 1)],
        [request(REQUEST_ID, True, 0.5, 3), request("old", True, 90.0, 700), request("done", False, 2.0, 40)],
    )


def column(screen: TopApp, panel: str, index: int = 0) -> list[str]:
    table = screen.query_one(f"#{panel}", DataTable)
    return [str(table.get_row_at(i)[index]) for i in range(table.row_count)]


def head(screen: TopApp) -> str:
    return str(screen.query_one("#head", Static).render())


@pytest.fixture
def screen() -> TopApp:
    turns = count()
    return TopApp(lambda: snapshot(next(turns)), 0.02)


async def until(pilot, condition) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"the condition was still false after {LIMIT} s"
        await pilot.pause(0.02)


async def test_every_panel_is_filled(screen):
    async with screen.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: column(screen, "engines"))
        assert column(screen, "engines") == ["engine-0", "engine-1", "engine-2"]
        assert column(screen, "engines", 1) == ["serving", "serving", "lost"]
        assert column(screen, "engines", 2)[2] == "–"
        assert column(screen, "engines", 3)[0] == "2 of 64"
        assert column(screen, "engines", 6)[0].endswith("25%")
        assert column(screen, "detokenizers") == ["detok-0"]
        assert column(screen, "routers") == ["router-0", "b:1"]
        assert column(screen, "routers", 1) == ["serving", "no answer"]
        assert column(screen, "tenants") == ["none", "search"]
        assert column(screen, "requests") == [REQUEST_ID, "old", "done"]
        assert column(screen, "requests", 4) == ["–", "–", "250 ms"]
        assert column(screen, "requests", 8) == ["6", "8", "20"]
        await until(pilot, lambda: len(screen.query_one(Sparkline).data or ()) > 5)


@pytest.mark.parametrize("width", [80, 120, 150, 170])
async def test_panels_fit_terminals_of_any_width(screen, width):
    async with screen.run_test(size=(width, 40)) as pilot:
        await until(pilot, lambda: column(screen, "requests"))
        wide = ("engines", "requests") if width in (80, 170) else ()
        for name in ("detokenizers", "routers", "tenants", *wide):
            table = screen.query_one(f"#{name}", DataTable)
            await until(pilot, lambda table=table: table.virtual_size.width <= table.size.width)
            assert table.region.right <= width


async def test_requests_are_visible_in_a_low_terminal(screen):
    async with screen.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: column(screen, "requests"))
        await until(pilot, lambda: 3 < screen.query_one("#requests", DataTable).region.bottom <= 23)
        assert screen.query_one("#requests", DataTable).size.height > 2


async def test_a_snapshot_that_arrives_after_the_screen_has_ended_is_ignored(screen):
    async with screen.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: column(screen, "engines"))
    screen._on_snapshot(snapshot(9))


async def test_the_key_s_switches_to_the_next_order(screen):
    async with screen.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: column(screen, "engines"))
        await pilot.press("s")
        assert column(screen, "engines") == ["engine-2", "engine-1", "engine-0"]
        assert column(screen, "requests") == ["old", "done", REQUEST_ID]
        assert "by load" in head(screen)
        await pilot.press("s")
        assert column(screen, "engines") == ["engine-0", "engine-1", "engine-2"]
        assert column(screen, "requests") == ["old", "done", REQUEST_ID]
        await pilot.press("s")
        assert "by name" in head(screen)


async def test_pause_and_quit(screen):
    async with screen.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: column(screen, "engines"))
        await pilot.press("p")
        assert head(screen).endswith("paused")
        speeds_before = column(screen, "engines", 9)
        await pilot.pause(0.2)
        assert column(screen, "engines", 9) == speeds_before
        await pilot.press("p")
        await until(pilot, lambda: column(screen, "engines", 9) != speeds_before)
        await pilot.press("q")
        await until(pilot, lambda: not screen.is_running)


def answer(router: str, states: dict[str, int], open_requests: int = 0) -> Answer:
    info = pb.GetServerInfoResponse(router_id=router, models=[pb.Model(name="tiny")])
    stats = pb.Stats(router=pb.RouterStats(router_id=router, open_requests=open_requests))
    for name, state in states.items():
        known = {"model_fingerprint": "0123456789abcdef", "model_version": "v2"} if state == SERVING else {}
        info.engines.add(engine_id=name, state=state, **known)
        if state == SERVING:
            stats.engines.add(engine_id=name, active_requests=3)
    stats.tenants.add(tenant="search", open_requests=open_requests)
    return Answer(f"{router}:1", info, stats)


def test_the_answers_of_several_routers_are_combined():
    ring = combine([
        answer("r0", {"e0": SERVING, "e1": LOST}, 2),
        answer("r1", {"e0": SERVING, "e1": SERVING}, 3),
        Answer("r2:1", error="connection\nrefused"),
    ])  # fmt: skip
    assert [(row.id, row.state, row.active) for row in ring.engines] == [("e0", "serving", 3), ("e1", "serving", 3)]
    assert [(row.id, row.state, row.error) for row in ring.routers] == [
        ("r0", "serving", ""),
        ("r1", "serving", ""),
        ("", "no answer", "connection refused"),
    ]
    assert [(row.tenant, row.open) for row in ring.tenants] == [("search", 5)]
    assert ring.models == ["tiny"]


def test_the_state_of_an_engine_for_one_phase_has_its_name():
    asked = answer("r0", {"e0": SERVING, "e1": SERVING, "e2": pb.PEER_STATE_UNKNOWN})
    for engine, phase in zip(asked.info.engines, (pb.ENGINE_PHASE_PREFILL, pb.ENGINE_PHASE_BOTH), strict=False):
        engine.phase = phase
    states = [str(panels.engine_state(engine)) for engine in combine([asked]).engines]
    assert states == ["serving prefill", "serving", "unknown"]


def test_the_column_model_has_the_name_and_the_version():
    (engine,) = combine([answer("r0", {"e0": SERVING})]).engines
    assert (engine.model, engine.model_version) == ("tiny", "v2")
    assert str(panels.model(engine)) == "tiny v2"
    assert (
        str(panels.model(EngineRow("e1", "serving", model="tiny", model_fingerprint="0123456789"))) == "tiny 01234567"
    )
    (unknown,) = combine([answer("r0", {"e0": pb.PEER_STATE_UNKNOWN})]).engines
    assert str(panels.model(unknown)) == ""


@pytest.fixture
def filled(script):
    script.info = pb.GetServerInfoResponse(router_id="router-0", version="1.2", models=[pb.Model(name="tiny")])
    script.info.engines.add(engine_id="engine-0", state=SERVING)
    script.stats.engines.add(engine_id="engine-0", used_kv_blocks=7, max_kv_blocks=14, tokens_per_second=321.4)
    script.stats.router.open_requests = 2
    script.stats.requests.add(request_id="r", tenant="search", state="ON_RING", open=True, completion_tokens=5)
    script.stats.requests.add(request_id="s", state="EOS").time_to_first_token.FromMilliseconds(250)
    return script


def test_once_as_json(sluice, filled):
    result = sluice("top", "--once", "--json")
    assert result.exit_code == 0
    ring = json.loads(result.stdout)
    assert ring["models"] == ["tiny"]
    (engine,) = ring["engines"]
    assert (engine["id"], engine["state"], engine["kv_blocks_used"]) == ("engine-0", "serving", 7)
    assert ring["routers"][0]["open"] == 2
    request, ended = ring["requests"]
    assert (request["first_token_seconds"], ended["first_token_seconds"]) == (None, 0.25)
    assert (request["id"], request["tenant"], request["state"], request["router"]) == (
        "r",
        "search",
        "on_ring",
        "router-0",
    )


def test_once_as_tables_needs_no_textual(sluice, filled, monkeypatch):
    imported = builtins.__import__

    def without_textual(name, *arguments, **options):
        if name.startswith("textual"):
            raise ModuleNotFoundError(name)
        return imported(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_textual)
    result = sluice("top")
    assert result.exit_code == 0
    for expected in ("engine-0", "50%", "321", "router-0", "search"):
        assert expected in result.stdout


def top_once(*addresses: str, as_json: bool = False):
    options = ["--json"] if as_json else []
    return CliRunner().invoke(app, ["top", "--once", *options, "--address", ",".join(addresses)])


def test_without_a_server_one_line_says_what_to_check():
    result = top_once("127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: no Sluice server answers at 127.0.0.1:1 (Connection refused); start one with: sluice serve\n"
    )


def test_without_a_server_there_is_still_json():
    result = top_once("127.0.0.1:1", as_json=True)
    assert result.exit_code == 1
    (router,) = json.loads(result.stdout)["routers"]
    assert router["state"] == "no answer"
    assert router["error"].startswith("no Sluice server answers at 127.0.0.1:1 ")


def test_an_address_that_accepts_connections_but_does_not_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        result = top_once(address)
    assert result.exit_code == 1
    assert result.stderr == f"error: {address} did not answer within 2 s: check that a router listens there\n"


def test_a_router_that_does_not_answer_is_reported_along_with_the_others(address, filled):
    result = top_once(address, "127.0.0.1:1")
    assert result.exit_code == 0
    assert "router-0" in result.stdout
    assert "no answer" in result.stdout
    assert result.stderr.startswith("error: no Sluice server answers at 127.0.0.1:1 ")
    assert result.stderr.count("\n") == 1


def test_json_needs_once(sluice):
    assert sluice("top", "--json").exit_code == 1
