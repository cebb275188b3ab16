"""Both clients with a fake server: results, streams, metadata and other calls."""

import subprocess
import sys

import grpc
import pytest

from sluice import AsyncClient, Client
from sluice.client import Cancelled, Chunk, FinishReason, LostEvents, ServerError, Unavailable
from tests.fakes.failures import Failure


@pytest.mark.process
def test_importing_sluice_imports_few_modules() -> None:
    code = "import sluice, sluice.wire.errors, sys; sys.exit('grpc' in sys.modules or 'google.protobuf' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_name_of_the_package() -> None:
    import sluice

    with pytest.raises(AttributeError, match="Clint"):
        _ = sluice.Clint


async def test_generate(script, address) -> None:
    with Client(address) as client:
        generation = client.generate("x", max_tokens=5)
    assert generation.text == "Hello, world"
    assert generation.request_id == "r1"
    assert generation.finish_reason is FinishReason.STOP_STRING
    output = generation.outputs[0]
    assert (output.stop_string, output.stop_token_id, output.seed) == ("!", None, 7)
    assert (generation.usage.prompt_tokens, generation.usage.completion_tokens, generation.usage.cached_tokens) == (
        3,
        3,
        2,
    )
    assert generation.timings is None
    assert script.seen[-1].spec.stopping.max_tokens == 5
    async with AsyncClient(address) as client:
        assert await client.generate("x", max_tokens=5) == generation


async def test_a_collected_stream_equals_the_result_of_generate(script, address) -> None:
    script.stop_string = "!"
    with Client(address) as client:
        expected = client.generate("x", token_ids=True)
        assert client.stream("x", token_ids=True).collect() == expected
        closed = client.stream("x")
        closed.close()
        with pytest.raises(Cancelled, match="closed"):
            closed.collect()
    async with AsyncClient(address) as client:
        assert await client.stream("x", token_ids=True).collect() == expected


async def test_stream(script, address) -> None:
    with Client(address) as client:
        stream = client.stream("x", token_ids=True)
        assert stream.usage is None
        chunks = list(stream)
    assert [chunk.text for chunk in chunks] == ["Hello", ", ", "world", ""]
    assert [chunk.token_ids for chunk in chunks] == [(0,), (1,), (2,), ()]
    assert chunks[1] == Chunk(index=0, text=", ", token_ids=(1,), token_offset=1, token_count=1)
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, FinishReason.LENGTH]
    assert chunks[-1].completion_tokens == 3
    assert (stream.request_id, stream.seed, stream.prompt_tokens, stream.cached_tokens) == ("r1", 7, 3, 2)
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 3
    assert list(stream) == []
    async with AsyncClient(address) as client:
        async_stream = client.stream("x", token_ids=True)
        assert [chunk async for chunk in async_stream] == chunks
    assert async_stream.usage == stream.usage


async def test_a_stream_that_fails_and_is_not_resumed(script, address) -> None:
    script.failure, script.fail_after = Failure(grpc.StatusCode.UNAVAILABLE, "engine lost"), 2
    texts = []
    with Client(address, resume_timeout=0) as client, pytest.raises(Unavailable, match="engine lost"):
        texts.extend(chunk.text for chunk in client.stream("x"))
    async with AsyncClient(address, resume_timeout=0) as client:
        stream = client.stream("x")
        with pytest.raises(Unavailable, match="engine lost"):
            _ = [texts.append(chunk.text) async for chunk in stream]
        assert stream.usage is None
    assert set(texts) <= {"Hello", ", "}


@pytest.mark.parametrize("flaw", ["lose_event", "omit_done"])
async def test_lost_events_are_detected(script, address, flaw) -> None:
    setattr(script, flaw, True)
    with Client(address, resume_timeout=0) as client, pytest.raises(ServerError, match="stream"):
        list(client.stream("x"))
    async with AsyncClient(address, resume_timeout=0) as client:
        with pytest.raises(ServerError, match="stream"):
            _ = [chunk async for chunk in client.stream("x")]


def test_async_client_needs_an_event_loop() -> None:
    with pytest.raises(RuntimeError):
        AsyncClient()


async def test_metadata_of_a_call(script, address) -> None:
    metadata, keys = (("x-trace", "1"), ("authorization", "Bearer mine")), ("x-trace", "authorization", "x-all")
    with Client(address, token="all", metadata=(("x-all", "2"),)) as client:
        calls = (
            lambda: client.generate("x", metadata=metadata),
            lambda: list(client.stream("x", metadata=metadata)),
            lambda: client.tokenize("x", metadata=metadata),
            lambda: client.detokenize([97], metadata=metadata),
            lambda: client.models(metadata=metadata),
        )
        for call in calls:
            call()
            assert [script.metadata[-1].get(name) for name in keys] == ["1", "Bearer mine", "2"]
        client.generate("x")
        assert [script.metadata[-1].get(name) for name in keys] == [None, "Bearer all", "2"]
    async with AsyncClient(address, token="all") as client:
        await client.generate("x", metadata=metadata)
        assert script.metadata[-1]["authorization"] == "Bearer mine"
        [_ async for _ in client.stream("x", metadata=metadata)]
        assert script.metadata[-1]["authorization"] == "Bearer mine"
        for answer in (client.tokenize, client.detokenize):
            await answer("a" if answer == client.tokenize else [97], metadata=metadata)
            assert script.metadata[-1]["authorization"] == "Bearer mine"
        await client.models(metadata=metadata)
        assert script.metadata[-1]["authorization"] == "Bearer mine"


async def test_each_attempt_sends_the_metadata_of_its_call(script, address) -> None:
    script.omit_done = script.lose_event = True
    async with AsyncClient(address, resume_timeout=0.3) as client:
        with pytest.raises(LostEvents):
            [_ async for _ in client.stream("x", metadata=(("x-trace", "1"),))]
    assert len(script.metadata) > 1
    assert {metadata["x-trace"] for metadata in script.metadata} == {"1"}


def test_tokens_of_a_chat(script, address) -> None:
    with Client(address) as client:
        tokenized = client.tokenize([{"role": "user", "content": "ab"}], template_kwargs={"x": 1}, tools_json="[]")
        assert tokenized.token_ids == (97, 98)
        with pytest.raises(TypeError, match="continue_final_message: for chats only"):
            client.tokenize("ab", continue_final_message=True)
    chat = script.seen[-1].chat
    assert (chat.tools_json, dict(chat.template_kwargs)) == ("[]", {"x": 1})


async def test_other_calls(script, address) -> None:
    with Client(address, metadata=(("authorization", "Bearer t"),)) as client:
        assert client.abort("r1", "why") is True
        assert script.seen[-1].reason == "why"
        assert script.metadata[-1]["authorization"] == "Bearer t"
        assert client.abort("r2") is False
        assert client.tokenize("ab").token_ids == (97, 98)
        assert client.tokenize("ab", offsets=True).offsets == ((0, 1), (1, 2))
        assert not script.seen[-1].HasField("add_special_tokens")
        assert client.detokenize([97, 98], skip_special_tokens=False) == "ab"
        assert script.seen[-1].HasField("skip_special_tokens")
        assert [model.name for model in client.models()] == ["tiny"]
        assert client.health() is True
        assert client.health("nothing.Here") is False
        assert len(client.stats().engines) == 0
    async with AsyncClient(address) as client:
        assert await client.abort("r1") is True
        assert (await client.tokenize("ab")).token_ids == (97, 98)
        assert await client.detokenize([97, 98]) == "ab"
        assert [model.name for model in await client.models()] == ["tiny"]
        assert await client.health() is True
        assert await client.health("nothing.Here") is False
        assert len((await client.stats()).engines) == 0
