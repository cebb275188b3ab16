"""The most likely of several outputs."""

import math

from router.requests.token_log import RequestLog
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.wire.errors import FinishReason
from sluice.wire.params import derive_seed
from sluice.wire.rows import Started, TextRow, TokenLogprob
from tests.fakes.ring_scripts import end
from tests.router.conftest import refused, text_spec


def scored(sums: list[float], reasons: dict[int, FinishReason] | None = None):
    """A script where sequence i has i + 1 tokens, whose logprobs have the sum `sums[i]`."""

    async def script(call):
        for i, total in enumerate(sums):
            count = i + 1
            logprobs = [TokenLogprob(total / count, 1, []) for _ in range(count)]
            last = end((reasons or {}).get(i, FinishReason.LENGTH))
            await call.send(call.row(0, [300 + i] * count, f"text {i}", i, last, logprobs), start=i == 0)

    return script


async def test_the_most_likely_outputs_are_returned_best_first(client, ring):
    ring.script = scored([-3.0, -1.0, -5.0, -1.0])
    answer = await client.generate(
        text_spec(n=3, best_of=4, output=pb.OutputOptions(token_ids=True), sampling=sampling_pb2.SamplingParams(seed=5))
    )
    submit = ring.calls[0].submit
    assert (submit.n, submit.sampling.logprobs) == (4, 0)
    assert [(output.index, output.text) for output in answer.outputs] == [(0, "text 1"), (1, "text 3"), (2, "text 0")]
    assert [output.cumulative_logprob for output in answer.outputs] == [-1.0, -1.0, -3.0]
    assert [output.seed for output in answer.outputs] == [derive_seed(5, i) for i in (1, 3, 0)]
    assert [list(output.token_ids) for output in answer.outputs] == [[301] * 2, [303] * 4, [300]]
    assert not any(output.logprobs for output in answer.outputs)
    # Usage counts all generated tokens, not only returned ones.
    assert answer.usage.completion_tokens == 1 + 2 + 3 + 4


async def test_a_sequence_that_was_stopped_is_ranked_after_those_that_ended(client, ring):
    ring.script = scored([-0.1, -3.0, -2.0], {0: FinishReason.TIME_LIMIT})
    answer = await client.generate(text_spec(best_of=3, output=pb.OutputOptions(logprobs=0)))
    assert [output.text for output in answer.outputs] == ["text 2"]
    assert len(answer.outputs[0].logprobs) == 3


async def test_best_of_is_refused_for_streams(client, ring):
    details = await refused(client.events(text_spec(best_of=2)))
    assert (details.fields, details.info.reason) == (["spec.best_of"], "INVALID_ARGUMENT")
    assert "only Generate" in details.error.details()
    assert not ring.calls
    assert (await client.events(text_spec(n=2, best_of=2)))[-1].HasField("done")


async def test_nan_is_the_least_likely(client, ring):
    ring.script = scored([-3.0, math.nan, -1.0, -math.inf])
    answer = await client.generate(text_spec(n=3, best_of=4))
    assert [output.text for output in answer.outputs] == ["text 2", "text 0", "text 1"]


async def test_sums_include_the_tokens_of_a_lost_attempt(ring, start, quick_recovery):
    """The sums continue with the tokens of the next attempt, and sequences that have ended are not run again."""
    first_engine, second_engine = ring.add_engine("engine"), ring.add_engine("other")
    ring.add_detokenizer()

    async def script(call):
        first = not call.submit.attempt
        offsets = [len(call.submit.resume.get(i, ())) for i in range(2)]
        if first:
            logprobs = [TokenLogprob(-5.0, 1, [])]
            await call.send(call.row(0, [300], "a", 0, None, logprobs), start=True)
            await call.send(call.row(0, [301], "b", 1, end(FinishReason.STOP_STRING), [TokenLogprob(-4.0, 1, [])]))
            await ring.until_read()
            call.engine.beating = False
        else:
            assert call.submit.ended == [1]
            last = end(FinishReason.LENGTH)
            await call.send(call.row(offsets[0], [302], "c", 0, last, [TokenLogprob(-0.5, 1, [])]), start=True)

    ring.script = script
    client = await start(peer_timeout=1.0)
    answer = await client.generate(text_spec(best_of=2))
    (output,) = answer.outputs
    assert (output.text, output.cumulative_logprob) == ("b", -4.0)
    assert output.finish_reason == pb.FINISH_REASON_STOP_STRING
    assert answer.usage.completion_tokens == 3
    assert len(first_engine.calls) == len(second_engine.calls) == 1


def test_logprobs_that_are_not_returned_are_only_summed():
    log = RequestLog(1, keep_logprobs=False)
    log.start(Started(1, 0, 1, 0))
    log.append(TextRow(1, 0, 0, 0, [5, 6], [TokenLogprob(-1.0, 1, []), TokenLogprob(-2.0, 1, [])], "", None))
    (sequence,) = log.sequences
    assert (sequence.logprobs, sequence.cumulative) == ([], -3.0)
