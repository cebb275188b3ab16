import asyncio

import pytest

from sluice.ring.errors import FinishReason
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from tests.fakes.ring_peers import end, generate, text_of, token_at
from tests.router.conftest import text_spec


def kinds(events):
    return [event.WhichOneof("event") for event in events]


async def test_started_deltas_finished_done_numbered_from_one(client, ring):
    events = await client.events(text_spec(request_id="r-1"))
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert kinds(events)[0] == "started"
    assert kinds(events)[-2:] == ["finished", "done"]
    assert set(kinds(events)[1:-2]) == {"delta"}
    submit = ring.calls[0].submit
    assert events[0].started == pb.Started(
        request_id="r-1",
        prompt_tokens=len(submit.prompt),
        cached_tokens=len(submit.prompt) // 2,
        seed=submit.sampling.seed,
    )
    tokens = [token_at(submit, 0, i) for i in range(24)]
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == text_of(tokens)
    assert not any(delta.token_ids for delta in deltas)
    at = 0
    for delta in deltas:
        assert delta.token_offset == at
        at += delta.token_count
    assert at == 24
    assert events[-2].finished == pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH, completion_tokens=24)
    done = events[-1].done
    assert done.usage == pb.Usage(
        prompt_tokens=len(submit.prompt), completion_tokens=24, cached_tokens=len(submit.prompt) // 2
    )
    assert not done.HasField("timings")


async def test_unary_gives_what_the_stream_gives(client, ring):
    spec = text_spec(n=3, output=pb.OutputOptions(token_ids=True), sampling=sampling_pb2.SamplingParams(seed=5))
    events = await client.events(spec)
    answer = await client.generate(spec)
    for output in answer.outputs:
        deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == output.index]
        assert "".join(delta.text for delta in deltas) == output.text
        assert [token for delta in deltas for token in delta.token_ids] == list(output.token_ids)
    assert [output.index for output in answer.outputs] == [0, 1, 2]
    assert len({output.text for output in answer.outputs}) == 3
    assert answer.outputs[0].seed == events[0].started.seed == 5
    assert len({output.seed for output in answer.outputs}) == 3
    assert answer.usage == events[-1].done.usage
    assert answer.usage.completion_tokens == 72
    assert [call.submit.text.interval for call in ring.calls] == [1, 0]
    assert answer.request_id != events[0].started.request_id
