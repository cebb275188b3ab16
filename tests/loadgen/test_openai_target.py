"""The OpenAI target against a fake server, over a real socket."""

import re
import threading

import pytest

from sluice.loadgen.openai_target import OpenAITarget, base_url
from sluice.loadgen.run import send_one
from sluice.loadgen.target import Outcome, RequestOptions, TargetError
from sluice.loadgen.workload import Request
from tests.fakes.openai_server import Script, serve


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def address(script):
    with serve(script) as address:
        yield address


async def send(address, model="", token=None, **options):
    target = await OpenAITarget.open(address, RequestOptions(model, **options), token)
    try:
        return target, await send_one(target, Request("one two three", 4))
    finally:
        await target.close()


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream(address, script, chat, monkeypatch):
    script.pause, script.turns = 0.02, threading.Semaphore(1)
    on_chunk = Outcome.on_chunk

    def on_chunk_then_release(self, *arguments):
        on_chunk(self, *arguments)
        # The server's pause before the next chunk begins only now, so that a slow reader measures each pause too.
        script.turns.release()

    monkeypatch.setattr(Outcome, "on_chunk", on_chunk_then_release)
    target, outcome = await send(address, chat=chat, token="secret")
    assert (outcome.error, outcome.text) == ("", "w0 w1 w2 w3 ")
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (6, 4)
    assert 0.02 <= outcome.first_token <= outcome.latency
    assert len(outcome.gaps) == 3
    assert sum(outcome.gaps) > 0.04
    (body,) = script.bodies
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("small", 4, True, True)
    assert ("messages" in body) is chat
    assert script.tokens == ["Bearer secret"]
    assert target.model == "small"


async def test_without_usage_chunks_are_counted(address, script):
    script.usage = False
    _, outcome = await send(address, "named")
    assert (outcome.completion_tokens, outcome.output_tokens, outcome.prompt_tokens) == (None, 4, 0)
    assert script.bodies[0]["model"] == "named"


async def test_a_stream_may_end_with_a_finish_reason_and_without_done(address, script):
    script.says_done = False
    _, outcome = await send(address)
    assert (outcome.error, outcome.completion_tokens) == ("", 4)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"status": 503}, "HTTP 503: .*no room"),
        ({"ends_early": True}, "ended without"),
        ({"error_after": 2}, "in the stream: .*engine died"),
    ],
)
async def test_failures(address, script, change, error):
    for name, value in change.items():
        setattr(script, name, value)
    _, outcome = await send(address)
    assert not outcome.succeeded
    assert re.search(error, outcome.error)


async def test_no_server():
    with pytest.raises(TargetError, match=r"no server answers at http://127\.0\.0\.1:1/v1/ \("):
        await send("127.0.0.1:1")
    _, outcome = await send("127.0.0.1:1", "named")
    assert outcome.error.startswith("ConnectError")


@pytest.mark.parametrize(
    "address", ["host:1", "http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"]
)
def test_addresses(address):
    assert base_url(address) == "http://host:1/v1/"
