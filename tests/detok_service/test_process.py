"""The detokenizer with real sockets and as a real process."""

import signal
import threading

import pytest
import structlog
from tokenizers import Tokenizer

from detok_service.decoders import load_decoders
from detok_service.service import Detokenizer, Identity
from sluice.lanes.inbox import Inbox
from sluice.lanes.lane import Lane
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.heartbeats import KeepAlive
from sluice.wire.params import TextParams
from sluice.wire.requests import Drop, ToDetokenizer
from sluice.wire.rows import End, Open, Times, TokenBatch, TokenRow
from tests.detok_service.processes import Process, Router, opening, send
from tests.fakes.tokenizers import TINY

pytestmark = pytest.mark.process

LENGTH = End(FinishReason.LENGTH, Times(0.0, 0.0, 0.0))


@pytest.fixture
def routers(context, tmp_path):
    routers = [Router(context, f"ipc://{tmp_path}/router-{i}", capacity=4) for i in range(2)]
    yield routers
    for router in routers:
        router.inbox.close()


def test_a_slow_router_loses_nothing_and_does_not_delay_others(context, routers, tmp_path, monkeypatch):
    # The routers send no hellos.
    monkeypatch.setattr("detok_service.service.ROUTER_SILENCE_SECONDS", 600.0)
    slow, quick = routers
    decoders = load_decoders(TINY / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    inbox = Inbox(context, f"ipc://{tmp_path}/detok", ToDetokenizer)
    service = Detokenizer(
        Identity("detok", 1, inbox.address),
        decoders,
        lambda address: Lane(context, address, capacity=2),
        10_000,
        structlog.get_logger(),
    )
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            inbox.wait(0.01)
            service.handle(inbox.receive())
            service.tick()

    thread = threading.Thread(target=serve)
    thread.start()
    lane = Lane(context, inbox.address)
    streams = 64
    text = "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)  # 🚀 done\n"
    cycle = tokenizer.encode(text).ids
    tokens = []
    opens = [Open(i, 1, 1, TextParams(), routers[i % 2].address, 1, 0) for i in range(streams)]
    try:
        last = False
        while not last:
            last = len(tokens) >= 300 and service.waiting > 2
            offset, token = len(tokens), cycle[len(tokens) % len(cycle)]
            tokens.append(token)
            rows = [TokenRow(i, 1, 0, offset, [token], [], LENGTH if last else None) for i in range(streams)]
            send(lane, TokenBatch.of("engine", 1, [] if offset else opens, rows))
            quick.read()
        quick.wait_for(lambda: len(quick.ends) == streams // 2)
        assert len(slow.ends) == 0
        slow.wait_for(lambda: len(slow.ends) == streams // 2)
    finally:
        stop.set()
        thread.join()
        lane.close()
        service.close(0.0)
        inbox.close()
    text_of_all = tokenizer.decode(tokens)
    for router in routers:
        assert set(router.texts.values()) == {text_of_all}
        assert all(router_tokens == tokens for router_tokens in router.tokens.values())
        assert router.gaps == 0
    assert service.streams == 0


def test_a_process_serves_and_drains(context, routers, tmp_path):
    process = Process(tmp_path, "--id", "detok-7", "--drain-timeout", "60")
    router, _ = routers
    try:
        assert (process.ready["event"], process.ready["id"]) == ("ready", "detok-7")
        assert process.ready["decoder"] == "bytes"
        assert process.ready["settings"]["id"] == "detok-7"
        lane = Lane(context, process.ready["address"])
        router.greet(lane)
        router.wait_for(lambda: router.heartbeats)
        assert router.heartbeats[0].detokenizer == "detok-7"
        tokens = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode("x = '🚀'; y").ids
        opens = [Open(i, 1, 1, TextParams(stop=stop), router.address, 1, 0) for i, stop in [(1, ()), (2, ("🚀",))]]
        send(lane, TokenBatch.of("engine", 1, opens, [TokenRow(i, 1, 0, 0, tokens[:2], [], None) for i in (1, 2)]))
        router.wait_for(lambda: len(router.started) == 2)

        process.child.send_signal(signal.SIGTERM)
        router.wait_for(lambda: router.heartbeats[-1].draining)
        send(lane, TokenBatch.of("engine", 1, [], [TokenRow(i, 1, 0, 2, tokens[2:], [], LENGTH) for i in (1, 2)]))
        router.wait_for(lambda: len(router.ends) == 2)
        assert router.texts == {1: "x = '🚀'; y", 2: "x = '"}
        assert router.ends[2].stop_string == "🚀"
        logs = process.end()
        assert process.child.returncode == 0
        assert [entry["event"] for entry in logs] == ["draining", "stopped"]
        lane.close()
    finally:
        process.child.kill()


def test_streams_that_outlive_the_drain_end_with_an_error(context, routers, tmp_path):
    process = Process(tmp_path, "--drain-timeout", "0.2")
    router, _ = routers
    try:
        lane = Lane(context, process.ready["address"])
        opened = Open(1, 1, 1, TextParams(), router.address, 1, 0)
        send(lane, TokenBatch.of("engine", 1, [opened], []))
        send(lane, KeepAlive("engine", 1))
        router.wait_for(lambda: router.started)
        process.child.send_signal(signal.SIGTERM)
        router.wait_for(lambda: router.ends)
        assert router.ends[1].fault.error_code is ErrorCode.DRAINING
        process.end()
        assert process.child.returncode == 0
        lane.close()
    finally:
        process.child.kill()


@pytest.mark.quick(2)
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 60])
def test_streams_of_a_killed_process_continue_in_another(context, routers, tmp_path, num_tokens):
    """The other process has only the tokens that the caller has received."""
    router, _ = routers
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    tokens = tokenizer.encode("def f(n):\n    return '🚀 日本 👩\u200d🚀' + n  # ✓ done\n" * 3).ids
    stops = {1: (), 2: ("n  # ✓ do", "never"), 3: ("日本 👩\u200d", "\n\n")}
    text = tokenizer.decode(tokens)
    first, second = [Process(tmp_path / str(i), "--drain-timeout", "60") for i in range(2)]
    try:
        lane = Lane(context, first.ready["address"])
        send(lane, TokenBatch.of("engine", 1, [opening(i, router, stop) for i, stop in stops.items()], []))
        for offset in range(num_tokens):
            send(
                lane,
                TokenBatch.of("engine", 1, [], [TokenRow(i, 1, 0, offset, [tokens[offset]], [], None) for i in stops]),
            )
        if num_tokens:
            router.wait_for(lambda: len(router.tokens) == 3)
        first.child.kill()
        first.child.wait()
        lane.close()
        router.attempt = 2
        open_streams = {i: stop for i, stop in stops.items() if i not in router.ends}
        received = {i: list(router.tokens.get(i, [])) for i in open_streams}
        lane = Lane(context, second.ready["address"])
        opens = [
            opening(i, router, stop, 2, {0: received[i]} if received[i] else {}) for i, stop in open_streams.items()
        ]
        send(lane, TokenBatch.of("engine", 2, opens, []))
        send(
            lane,
            TokenBatch.of(
                "engine",
                2,
                [],
                [TokenRow(i, 2, 0, len(received[i]), tokens[len(received[i]) :], [], LENGTH) for i in open_streams],
            ),
        )
        router.wait_for(lambda: len(router.ends) == 3)
        assert router.tokens[1] == tokens
        assert router.texts == {
            i: text[: min((text.index(stop_string) for stop_string in stop if stop_string in text), default=len(text))]
            for i, stop in stops.items()
        }
        assert [router.ends[i].stop_string for i in (1, 2, 3)] == [None, stops[2][0], stops[3][0]]
        lane.close()
    finally:
        first.child.kill()
        second.child.kill()


def test_a_process_whose_streams_were_moved_exits_immediately(context, routers, tmp_path):
    process = Process(tmp_path, "--drain-timeout", "60")
    router, _ = routers
    try:
        lane, control = (Lane(context, process.ready["address"]) for _ in range(2))
        router.greet(control)
        send(lane, TokenBatch.of("engine", 1, [opening(i, router, ()) for i in range(3)], []))
        router.wait_for(lambda: router.heartbeats and len(router.started) == 3)
        process.child.send_signal(signal.SIGTERM)
        router.wait_for(lambda: router.heartbeats[-1].draining)
        for i in range(3):
            send(control, Drop(i, 1))
        logs = process.end()
        assert process.child.returncode == 0
        assert logs[-1]["event"] == "stopped"
        assert router.ends == {}
        lane.close()
        control.close()
    finally:
        process.child.kill()


def test_a_process_does_not_wait_for_a_router_that_has_ended(context, routers, tmp_path):
    process = Process(tmp_path, "--drain-timeout", "60")
    router, _ = routers
    try:
        lane = Lane(context, process.ready["address"])
        router.greet(lane)
        router.wait_for(lambda: router.heartbeats)
        router.inbox.close()
        process.child.send_signal(signal.SIGTERM)
        logs = process.end()
        assert process.child.returncode == 0
        # The set is empty if the lane accepted the drain notice just before the process noticed the router's end.
        assert {entry["reason"] for entry in logs if entry["event"] == "router_lost"} <= {"ended"}
        lane.close()
    finally:
        process.child.kill()
