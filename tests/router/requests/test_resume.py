"""GenerationSpec.resume: a stream whose router was lost continues at another one."""

import pytest
from grpc import StatusCode

from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import OutputOptions, ResumeFrom
from sluice.v1.sampling_pb2 import GuidedDecoding, SamplingParams, StoppingCriteria
from sluice.wire.params import Guide, GuideKind
from tests.fakes.ring_scripts import generate, text_of
from tests.router.conftest import nothing_left, refused, text_spec

LENGTH = 24
SEED = SamplingParams(seed=5)


def of(events, kind, index=0):
    messages = [getattr(event, kind) for event in events if event.HasField(kind)]
    return [event for event in messages if event.index == index]


async def ids_of(client, n=1):
    """The token ids of the uninterrupted stream."""
    events = await client.events(text_spec(n=n, sampling=SEED, output=OutputOptions(token_ids=True)))
    return [[token for delta in of(events, "delta", i) for token in delta.token_ids] for i in range(n)]


@pytest.mark.parametrize("received", [0, 1, 7, LENGTH - 1])
async def test_a_stream_continues_where_it_broke(client, ring, received):
    (ids,) = await ids_of(client)
    spec = text_spec(
        sampling=SEED, output=OutputOptions(token_ids=True, echo=True), resume=[ResumeFrom(token_ids=ids[:received])]
    )
    events = await client.events(spec)
    deltas = of(events, "delta")
    assert [token for delta in deltas for token in delta.token_ids] == ids[received:]
    assert "".join(delta.text for delta in deltas) == text_of(ids[received:])
    assert deltas[0].token_offset == received
    assert of(events, "finished")[0].completion_tokens == LENGTH
    submit = ring.calls[-1].submit
    usage = events[-1].done.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(submit.prompt), LENGTH)
    assert (submit.attempt, submit.resume, submit.ended) == (0, {0: ids[:received]} if received else {}, [])
    await client.until(lambda: nothing_left(client))
    assert client.router.ring.counters.completion_tokens == LENGTH + LENGTH - received


async def test_each_output_is_resumed_separately(client, ring):
    first, second, third = await ids_of(client, 3)
    spec = text_spec(
        n=3,
        sampling=SEED,
        output=OutputOptions(token_ids=True, echo=True),
        resume=[ResumeFrom(index=2, token_ids=third), ResumeFrom(index=0, token_ids=first[:5])],
    )
    events = await client.events(spec)
    assert [token for delta in of(events, "delta", 0) for token in delta.token_ids] == first[5:]
    assert [token for delta in of(events, "delta", 1) for token in delta.token_ids] == second
    # The third output has all its tokens, so its end is sent immediately, without a delta.
    assert not of(events, "delta", 2)
    assert [of(events, "finished", i)[0].completion_tokens for i in range(3)] == [LENGTH] * 3
    assert "def f(x):" not in "".join(delta.text for i in range(3) for delta in of(events, "delta", i))


async def test_a_unary_response_contains_only_new_tokens(client, ring):
    (ids,) = await ids_of(client)
    spec = text_spec(
        sampling=SEED, output=OutputOptions(token_ids=True, echo=True), resume=[ResumeFrom(token_ids=ids[:9])]
    )
    answer = await client.generate(spec)
    (output,) = answer.outputs
    assert (list(output.token_ids), output.text) == (ids[9:], text_of(ids[9:]))
    assert answer.usage.completion_tokens == LENGTH


async def test_only_outputs_without_resumed_tokens_are_echoed(client, ring):
    events = await client.events(text_spec(n=2, output=OutputOptions(echo=True), resume=[ResumeFrom(index=0)]))
    assert "def f(x):" not in "".join(delta.text for delta in of(events, "delta", 0))
    assert of(events, "delta", 1)[0].text == "def f(x):"


async def test_a_resumed_stream_survives_the_loss_of_its_engine(client, ring):
    (ids,) = await ids_of(client)
    ended = []

    async def fail_once(call):
        if call.submit.attempt:
            ended.append(call)
            await generate(call)
        else:
            await call.send(call.row(5, [ids[5]], text_of([ids[5]])), start=True)
            call.engine.epoch += 1

    ring.script = fail_once
    spec = text_spec(sampling=SEED, output=OutputOptions(token_ids=True), resume=[ResumeFrom(token_ids=ids[:5])])
    events = await client.events(spec)
    assert [token for delta in of(events, "delta") for token in delta.token_ids] == ids[5:]
    assert ended[0].submit.resume == {0: ids[:6]}


async def test_a_later_attempt_has_the_same_guide_and_drafts(client, ring):
    submits = []

    async def fail_once(call):
        submits.append(call.submit)
        if call.submit.attempt:
            await generate(call)
        else:
            call.engine.epoch += 1

    ring.script = fail_once
    spec = text_spec(sampling=SEED, guided=GuidedDecoding(regex="a+"), resume=[ResumeFrom(token_ids=[5])])
    spec.speculation.draft_token_ids.extend([5, 6, 7])
    await client.events(spec, metadata=(("x-sluice-tenant", "search"),))
    assert [submit.extras.guide for submit in submits] == [Guide(GuideKind.REGEX, "a+")] * 2
    assert [submit.tenant for submit in submits] == ["search"] * 2
    assert submits[0].extras.speculation.draft_token_ids == (5, 6, 7)
    assert submits[0].extras.speculation == submits[1].extras.speculation


BAD = {
    "index beyond n": ({"resume": [ResumeFrom(index=1)]}, "spec.resume[0].index"),
    "index twice": ({"n": 2, "resume": [ResumeFrom(index=1), ResumeFrom(index=1)]}, "spec.resume[1].index"),
    "not in the vocabulary": ({"resume": [ResumeFrom(token_ids=[1, 9999])]}, "spec.resume[0].token_ids[1]"),
    "more than max_tokens": (
        {"resume": [ResumeFrom(token_ids=[1] * 4)], "stopping": StoppingCriteria(max_tokens=3)},
        "spec.resume[0].token_ids",
    ),
    "more than the context": ({"resume": [ResumeFrom(token_ids=[1] * 2049)]}, "spec.resume[0].token_ids"),
    "more than fits": ({"resume": [ResumeFrom(token_ids=[1] * 2047)]}, "spec.resume"),
    "no seed": ({"resume": [ResumeFrom(token_ids=[1])], "sampling": SamplingParams()}, "spec.sampling.seed"),
}


@pytest.mark.parametrize("case", BAD)
async def test_invalid_resumes_are_refused(client, ring, case):
    fields, field = BAD[case]
    details = await refused(client.events(text_spec(**({"sampling": SEED} | fields))))
    assert (details.code, details.fields) == (StatusCode.INVALID_ARGUMENT, [field])
    assert not ring.calls


async def test_greedy_needs_no_seed(client, ring):
    events = await client.events(
        text_spec(sampling=SamplingParams(temperature=0), resume=[ResumeFrom(token_ids=[1, 2])])
    )
    assert events[-1].HasField("done")
    assert of(events, "finished")[0].finish_reason == pb.FINISH_REASON_LENGTH
