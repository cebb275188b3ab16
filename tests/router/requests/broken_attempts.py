"""Scripts whose first attempt stops at a chosen point, and a check that the client gets everything regardless."""

import asyncio

from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import FinishReason
from tests.fakes.ring_scripts import Call, end, generate, text_of, token_at

LENGTH = 24
IDS = pb.OutputOptions(token_ids=True)


class Script:
    """First attempts stop at a chosen point; later attempts generate the whole output."""

    def __init__(self, first) -> None:
        self.first = first
        self.reached = asyncio.Event()
        self.attempts: list[Call] = []

    async def __call__(self, call: Call) -> None:
        self.attempts.append(call)
        if call.submit.attempt == 0:
            await self.first(call)
            await call.engine.ring.until_read()
            self.reached.set()
        else:
            await generate(call)


async def silent(call):
    """Nothing has been sent yet."""


async def begun(call):
    await call.send(start=True, cached=2)


async def midway(call):
    await call.send(start=True, cached=2)
    for offset in range(5):
        await call.send(*(tokens(call, sequence, offset) for sequence in range(call.submit.n)))


async def one_ended(call):
    await midway(call)
    last = [tokens(call, 0, offset) for offset in range(5, LENGTH)]
    last[-1] = last[-1]._replace(end=end(FinishReason.LENGTH))
    await call.send(*last, tokens(call, 1, 5))


def tokens(call, sequence, offset, count=1):
    ids = [token_at(call.submit, sequence, offset + i) for i in range(count)]
    return call.row(offset, ids, text_of(ids), sequence)


PHASES = {"silent": silent, "begun": begun, "midway": midway, "one ended": one_ended}


def check_whole(events, submit, n, length=LENGTH):
    """Check for one Started, every offset of every output once in order, one Finished each, Done; all numbered."""
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert events[0].HasField("started")
    assert events[-1].HasField("done")
    assert sum(event.HasField("started") or event.HasField("done") for event in events) == 2
    for index in range(n):
        deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
        expected = [token_at(submit, index, offset) for offset in range(length)]
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert [
            offset for delta in deltas for offset in range(delta.token_offset, delta.token_offset + delta.token_count)
        ] == list(range(length))
        assert "".join(delta.text for delta in deltas) == text_of(expected)
        (finished,) = [
            event.finished for event in events if event.HasField("finished") and event.finished.index == index
        ]
        assert (finished.finish_reason, finished.completion_tokens) == (pb.FINISH_REASON_LENGTH, length)
    usage = events[-1].done.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(submit.prompt), n * length)
