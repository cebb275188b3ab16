"""A server with OpenAI's API, over a real socket."""

import re
import threading

import pytest

from sluice.loadgen.openai_target import OpenAITarget, base_url
from sluice.loadgen.outcome import Outcome
from sluice.loadgen.run import send_one
from sluice.loadgen.target import TargetError
from sluice.loadgen.workload import Request
from tests.fakes.openai_server import Script, serve


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def address(script):
    with serve(script) as found:
        yield found


async def send(address, model="", chat=False, **options):
    target = await OpenAITarget.open(address, model, {"ignore_eos": True}, chat=chat, **options)
    try:
        return target, await send_one(target, Request("one two three", 4))
    finally:
        await target.close()


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream(address, script, chat, monkeypatch):
    script.pause, script.turns = 0.02, threading.Semaphore(1)
    on_chunk = Outcome.on_chunk

    def arrived(self, *arguments):
        on_chunk(self, *arguments)
        # Only now the pause before the next begins: a reader that is late has each of them all the same.
        script.turns.release()

    monkeypatch.setattr(Outcome, "on_chunk", arrived)
    target, found = await send(address, chat=chat, token="secret")
    assert (found.error, found.text, found.prompt_tokens, found.completion_tokens) == ("", "w0 w1 w2 w3 ", 6, 4)
    assert 0.02 <= found.first_token <= found.latency
    assert len(found.gaps) == 3
    assert sum(found.gaps) > 0.04
    (body,) = script.bodies
    assert (body["model"], body["max_tokens"], body["stream"], body["ignore_eos"]) == ("small", 4, True, True)
    assert ("messages" in body) is chat
    assert script.tokens == ["Bearer secret"]
    assert target.model == "small"


async def test_without_usage_chunks_are_counted(address, script):
    script.usage = False
    _, found = await send(address, "own")
    assert (found.completion_tokens, found.output_tokens, found.prompt_tokens) == (None, 4, 0)
    assert script.bodies[0]["model"] == "own"


async def test_a_stream_that_ends_with_its_reason_alone(address, script):
    script.says_done = False
    _, found = await send(address)
    assert (found.error, found.completion_tokens) == ("", 4)


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
    _, found = await send(address)
    assert not found.succeeded
    assert re.search(error, found.error)


async def test_no_server():
    with pytest.raises(TargetError, match=r"no server answers at http://127\.0\.0\.1:1/v1/ \("):
        await send("127.0.0.1:1")
    _, found = await send("127.0.0.1:1", "named")
    assert found.error.startswith("ConnectError")


@pytest.mark.parametrize(
    "address", ["host:1", "http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"]
)
def test_addresses(address):
    assert base_url(address) == "http://host:1/v1/"
