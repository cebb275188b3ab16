"""A stream that breaks anywhere, any number of times, yields what the undisturbed stream yields. Without sockets."""

import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.client import Chunk, FinishReason, LostEvents, ServerError, Unavailable
from sluice.client.retries import Retries
from sluice.client.stream_state import StreamState
from sluice.v1 import generation_pb2 as pb
from tests.client.joined import join
from tests.examples import examples
from tests.fakes.story import DRAWN_SEED, events

specs = st.builds(
    lambda n, length, seed, output: pb.GenerationSpec(
        text="p", n=n, sampling={"seed": seed}, stopping={"max_tokens": length}, output=output
    ),
    n=st.sampled_from([None, 1, 2, 3]),
    length=st.integers(1, 9),
    seed=st.sampled_from([None, 3]),
    output=st.builds(
        pb.OutputOptions,
        token_ids=st.booleans(),
        logprobs=st.sampled_from([None, 0]),
        echo=st.booleans(),
        context_logits=st.booleans(),
        generation_logits=st.booleans(),
        tensors=st.sampled_from([[], [pb.TensorSpec(name="a")], [pb.TensorSpec(name="a", context=True)]]),
    ),
)
flaws = st.tuples(st.integers(0, 16), st.sampled_from(["break", "lose", "repeat"]))


def new_state(spec: pb.GenerationSpec) -> tuple[StreamState, Retries]:
    attempts = Retries(2, None, 1000.0, 1000.0, 0.0)
    copy = pb.GenerationSpec()
    copy.CopyFrom(spec)
    return StreamState(copy, attempts), attempts


def with_flaw(stream, at: int, flaw: str):
    """The events up to a break; or all events, one of them lost or repeated, with consecutive sequence numbers."""
    events_of_stream = list(stream)
    event = events_of_stream[at] if at < len(events_of_stream) else None
    if flaw == "break" or event is None or not _has_content(event):
        return events_of_stream[:at]
    events_of_stream[at : at + 1] = [] if flaw == "lose" else [event] * 2
    for number, event in enumerate(events_of_stream, 1):
        copy = pb.GenerateStreamResponse()
        copy.CopyFrom(event)
        copy.sequence = number
        events_of_stream[number - 1] = copy
    return events_of_stream


def _has_content(event: pb.GenerateStreamResponse) -> bool:
    return bool(event.delta.token_count) or event.HasField("finished") or event.HasField("tensor")


def run_stream(spec: pb.GenerationSpec, plan: list[tuple[int, str]], seed: int) -> tuple[list[Chunk], StreamState]:
    """All chunks of a stream whose attempts fail as planned. The attempt after these does not fail."""
    rows, (resume, attempts), chunks = random.Random(seed), new_state(spec), []
    for at, flaw in [*plan, (10**6, "break")]:
        stream = with_flaw(events(resume.request(0.0).spec, rows), at, flaw)
        try:
            for event in stream:
                chunks += resume.on_event(event)
        except LostEvents:
            pass
        if resume.complete or resume.end_early():
            break
        attempts.on_failure(Unavailable("it broke"), 0.0)
    assert resume.complete
    return chunks, resume


@examples(300)
@given(spec=specs, plan=st.lists(flaws, max_size=6), seed=st.integers(0, 99))
def test_breaks_do_not_change_the_stream(spec, plan, seed) -> None:
    undisturbed_chunks, undisturbed = run_stream(spec, [], seed + 1)
    broken_chunks, resume = run_stream(spec, plan, seed)
    expected, joined = join(undisturbed_chunks), join(broken_chunks)
    assert joined == expected
    assert resume.usage == undisturbed.usage
    assert (resume.request_id, resume.seed) == (undisturbed.request_id, undisturbed.seed)
    assert all(output.ends for output in joined.values())
    if not spec.output.token_ids:
        assert not any(chunk.token_ids for chunk in broken_chunks)
        assert all(
            chunk.text or chunk.logprobs or chunk.finish_reason or chunk.token_count or chunk.tensor
            for chunk in broken_chunks
        )


def test_the_request_of_the_next_attempt() -> None:
    spec = pb.GenerationSpec(text="p", n=2, stopping={"max_tokens": 6}, time_limit=timedelta(seconds=10))
    resume, attempts = new_state(spec)
    first = resume.request(0.0).spec
    assert (list(first.resume), first.output.token_ids, first.sampling.HasField("seed")) == ([], True, False)
    assert first.time_limit.ToTimedelta() == timedelta(seconds=10)
    deltas = {0: 0, 1: 0}
    for event in events(first, random.Random(1)):
        resume.on_event(event)
        if event.HasField("delta"):
            deltas[event.delta.index] += event.delta.token_count
        if min(deltas.values()) > 1:
            break
    attempts.on_failure(Unavailable("it broke"), 4.0)
    second = resume.request(4.0).spec
    assert {resume_from.index: len(resume_from.token_ids) for resume_from in second.resume} == deltas
    assert (second.request_id, second.sampling.seed, second.text) == ("drawn", DRAWN_SEED, "p")
    assert second.time_limit.ToTimedelta() == timedelta(seconds=6)
    # The server ends the request, as it would have done.
    assert resume.request(99.0).spec.time_limit.ToTimedelta() == timedelta(milliseconds=1)


def test_a_stream_that_the_caller_resumes_can_be_resumed() -> None:
    spec = pb.GenerationSpec(text="p", sampling={"seed": 3}, stopping={"max_tokens": 6})
    all_chunks, _ = run_stream(spec, [], 1)
    ids = [
        pb.ResumeFrom(index=0, token_ids=event.delta.token_ids[:1])
        for event in list(events(spec, random.Random(1)))[1:2]
    ]
    spec.resume.extend(ids)
    spec.output.token_ids = True
    chunks, _ = run_stream(spec, [(2, "break")], 2)
    assert (chunks[0].token_offset, chunks[-1].completion_tokens) == (1, 6)
    assert "".join(chunk.text for chunk in all_chunks).endswith("".join(chunk.text for chunk in chunks))


def run_attempt(resume: StreamState, *messages) -> list[Chunk]:
    """The chunks of an attempt with these events."""
    resume.request(0.0)
    chunks = []
    for number, message in enumerate(messages, 1):
        kind = {pb.Started: "started", pb.Delta: "delta", pb.Finished: "finished"}[type(message)]
        chunks += resume.on_event(pb.GenerateStreamResponse(sequence=number, **{kind: message}))
    return chunks


def test_text_before_a_lost_end_is_not_returned_twice() -> None:
    """At the time limit, held-back text has no token. If the end is lost, the next attempt may return other text."""
    resume, _ = new_state(pb.GenerationSpec(text="p"))
    first = run_attempt(
        resume,
        pb.Started(request_id="r", seed=1),
        pb.Delta(text="a", token_ids=[1, 2], token_count=2),
        pb.Delta(text="?", token_offset=2),
    )
    assert [chunk.text for chunk in first] == ["a"]
    end = pb.Finished(finish_reason=pb.FINISH_REASON_TIME_LIMIT, completion_tokens=3)
    second = run_attempt(resume, pb.Started(), pb.Delta(text="é", token_ids=[3], token_offset=2, token_count=1), end)
    assert [(chunk.text, chunk.token_offset) for chunk in second] == [("é", 2), ("", 3)]
    assert second[-1].finish_reason is FinishReason.TIME_LIMIT


def test_a_beam_search_restarts() -> None:
    search, _ = new_state(pb.GenerationSpec(text="p", n=2, sampling={"beam_search": {"width": 2}}))
    best = pb.Delta(text="ab", token_ids=[1, 2], token_count=2), pb.Finished(completion_tokens=2)
    second = pb.Delta(index=1, text="c", token_ids=[3], token_count=1), pb.Finished(index=1, completion_tokens=1)
    first = run_attempt(search, pb.Started(request_id="r", seed=1), *best, second[0])
    assert not search.request(0.0).spec.resume
    restarted = run_attempt(search, pb.Started(), *best, *second)
    assert [(chunk.index, chunk.text) for chunk in first + restarted] == [(0, "ab"), (0, ""), (1, "c"), (1, "")]


def test_events_received_before_are_dropped() -> None:
    resume, _ = new_state(pb.GenerationSpec(text="p", n=2))
    a, b = (
        pb.Delta(text="a", token_ids=[1], token_count=1),
        pb.Delta(text="b", token_ids=[2], token_offset=1, token_count=1),
    )
    assert [chunk.text for chunk in run_attempt(resume, pb.Started(), a, a, b, a, b)] == ["a", "b"]
    # The second output ended before its first token, which a resume cannot express: the next attempt generates some.
    empty = pb.Finished(index=1, finish_reason=pb.FINISH_REASON_EOS)
    assert len(run_attempt(resume, pb.Started(), empty)) == 1
    regenerated = pb.Delta(index=1, text="c", token_ids=[3], token_count=1)
    assert run_attempt(resume, pb.Started(), regenerated, pb.Finished(index=1, completion_tokens=1)) == []


@pytest.mark.parametrize("offset", [0, 2])
def test_gaps_and_partial_repetitions_are_errors(offset) -> None:
    resume, _ = new_state(pb.GenerationSpec(text="p"))
    run_attempt(resume, pb.Started(), pb.Delta(text="a", token_ids=[1], token_count=1))
    with pytest.raises(LostEvents, match=rf"expected offset 1 \(got {offset}\)"):
        run_attempt(resume, pb.Started(), pb.Delta(text="b", token_ids=[2, 3], token_offset=offset, token_count=2))


def test_tokens_without_ids_are_an_error() -> None:
    resume, _ = new_state(pb.GenerationSpec(text="p"))
    resume.request(0.0)
    with pytest.raises(ServerError, match="2 tokens came with 0 token ids"):
        resume.on_event(pb.GenerateStreamResponse(sequence=1, delta=pb.Delta(text="a", token_count=2)))


def test_an_output_out_of_range() -> None:
    resume, _ = new_state(pb.GenerationSpec(text="p", n=2))
    resume.request(0.0)
    with pytest.raises(ServerError, match="output 2"):
        resume.on_event(pb.GenerateStreamResponse(sequence=1, finished=pb.Finished(index=2)))


def test_the_fingerprint_belongs_to_the_model_of_the_tokens() -> None:
    """A stream without tokens is requested from the start, and another model may serve it."""
    resume, _ = new_state(pb.GenerationSpec(text="p", sampling={"seed": 3}))
    attempts = iter([("old", 0), ("new", 2), ("new", 1)])
    fingerprints = []
    for model, tokens in attempts:
        fingerprints.append([resume_from.model_fingerprint for resume_from in resume.request(0.0).spec.resume])
        known = sum(len(output.token_ids) for output in resume._outputs.values())
        resume.on_event(pb.GenerateStreamResponse(sequence=1, started=pb.Started(seed=3, model_fingerprint=model)))
        delta = pb.Delta(text="x", token_ids=[7] * tokens, token_offset=known, token_count=tokens)
        if tokens:
            resume.on_event(pb.GenerateStreamResponse(sequence=2, delta=delta))
    assert fingerprints == [[], [], ["new"]]


def test_a_resume_of_the_caller_keeps_its_fingerprint() -> None:
    resume, _ = new_state(pb.GenerationSpec(text="p", resume=[pb.ResumeFrom(token_ids=[1], model_fingerprint="old")]))
    assert [resume_from.model_fingerprint for resume_from in resume.request(0.0).spec.resume] == ["old"]
    assert [resume_from.model_fingerprint for resume_from in resume.request(0.0).spec.resume] == ["old"]


@pytest.mark.parametrize("adapter", [{"lora_id": "sql"}, {"lora_weights": {"config_json": b"{}", "safetensors": b"w"}}])
def test_a_stream_with_an_adapter_resumes_with_the_same_weights(adapter) -> None:
    """The fingerprint contains the adapter's version, since the id may have other weights at the next attempt."""
    resume, _ = new_state(pb.GenerationSpec(text="p", sampling={"seed": 3}, **adapter))
    model = "model." + "0f" * 16
    for expected in ([], [model], [model]):
        spec = resume.request(0.0).spec
        assert [resume_from.model_fingerprint for resume_from in spec.resume] == expected
        for name, value in adapter.items():
            assert getattr(spec, name) == getattr(pb.GenerationSpec(**{name: value}), name)
        known = sum(len(output.token_ids) for output in resume._outputs.values())
        resume.on_event(pb.GenerateStreamResponse(sequence=1, started=pb.Started(seed=3, model_fingerprint=model)))
        delta = pb.Delta(text="x", token_ids=[7], token_offset=known, token_count=1)
        resume.on_event(pb.GenerateStreamResponse(sequence=2, delta=delta))
