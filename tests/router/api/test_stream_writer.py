import asyncio
import math

from router.parse.parse import UNARY_INTERVAL
from sluice.v1 import generation_pb2 as pb
from sluice.v1 import sampling_pb2
from sluice.wire.errors import FinishReason
from sluice.wire.params import derive_seed
from sluice.wire.rows import TokenLogprob
from tests.fakes.ring_scripts import end, generate, text_of, token_at
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
        model_fingerprint="fingerprint",
    )
    tokens = [token_at(submit, 0, i) for i in range(24)]
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == text_of(tokens)
    assert not any(delta.token_ids for delta in deltas)
    offset = 0
    for delta in deltas:
        assert delta.token_offset == offset
        offset += delta.token_count
    assert offset == 24
    assert events[-2].finished == pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH, completion_tokens=24)
    done = events[-1].done
    assert done.usage == pb.Usage(
        prompt_tokens=len(submit.prompt), completion_tokens=24, cached_tokens=len(submit.prompt) // 2
    )
    assert not done.HasField("timings")


async def test_unary_returns_the_same_as_the_stream(client, ring):
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
    assert [call.submit.text.interval for call in ring.calls] == [1, UNARY_INTERVAL]
    assert answer.request_id != events[0].started.request_id


def deltas_of(events, index=0):
    return [event.delta for event in events if event.HasField("delta") and event.delta.index == index]


async def test_tokens_without_text_are_counted_by_the_next_delta(client, ring):
    async def script(call):
        await call.send(start=True)
        await call.send(call.row(0, [1, 2]))
        await call.send(call.row(2, [3], "abc"))
        await client.until(lambda: client.router.ring.requests.open[0].log.sequences[0].delivered == 3)
        await call.send(call.row(3, [4], "", 0, end(FinishReason.EOS)))

    ring.script = script
    events = await client.events(text_spec())
    assert [(delta.text, delta.token_offset, delta.token_count) for delta in deltas_of(events)] == [
        ("abc", 0, 3),
        ("", 3, 1),
    ]
    assert events[-2].finished.completion_tokens == 4


async def test_token_ids_are_sent_immediately_if_requested(client, ring):
    async def script(call):
        await call.send(call.row(0, [1, 2]), start=True)
        await client.until(lambda: client.router.ring.requests.open[0].log.sequences[0].delivered == 2)
        await call.send(call.row(2, [], "late", 0, end(FinishReason.LENGTH)))

    ring.script = script
    events = await client.events(text_spec(output=pb.OutputOptions(token_ids=True)))
    assert [(list(delta.token_ids), delta.text, delta.token_count) for delta in deltas_of(events)] == [
        ([1, 2], "", 2),
        ([], "late", 0),
    ]


async def test_echo_puts_the_prompt_before_each_output(client, ring):
    spec = text_spec("def f(x):", n=2, output=pb.OutputOptions(echo=True, token_ids=True))
    events = await client.events(spec)
    answer = await client.generate(spec)
    for output in answer.outputs:
        deltas = deltas_of(events, output.index)
        assert deltas[0].text == "def f(x):"
        assert (deltas[0].token_count, deltas[0].token_offset, list(deltas[0].token_ids)) == (0, 0, [])
        assert deltas[1].token_offset == 0
        assert output.text.startswith("def f(x):<")
        assert output.finish_reason == pb.FINISH_REASON_LENGTH
        assert len(output.token_ids) == 24
    assert answer.usage.completion_tokens == events[-1].done.usage.completion_tokens == 48


async def test_the_end_of_the_prompt(client, ring):
    spec = text_spec("def f(x):", output=pb.OutputOptions(prompt_tail=2))
    answer = await client.generate(spec)
    assert (await client.events(spec))[0].started.prompt_tail == answer.prompt_tail
    assert "def f(x):".endswith(answer.prompt_tail)
    assert 0 < len(answer.prompt_tail) < len("def f(x):")


async def test_logprobs_of_chosen_and_best_tokens(client, ring):
    async def script(call):
        logprobs = [
            TokenLogprob(-0.5, 1, [(300, -0.5), (301, -2.0)]),
            TokenLogprob(-math.inf, 9, [(5, math.nan)]),
        ]
        await call.send(call.row(0, [300, 4095], "xy", 0, end(FinishReason.LENGTH), logprobs), start=True)

    ring.script = script
    spec = text_spec(output=pb.OutputOptions(logprobs=2))
    answer = await client.generate(spec)
    assert ring.calls[0].submit.sampling.logprobs == 2
    first, second = answer.outputs[0].logprobs
    assert (first.token_id, first.logprob, first.rank) == (300, -0.5, 1)
    assert [(top.token_id, top.logprob, top.rank) for top in first.top] == [(300, -0.5, 1), (301, -2.0, 2)]
    bytes_of = client.router._text.vocabulary.bytes_of
    assert (first.token, first.top[1].token) == (bytes_of(300), bytes_of(301))
    assert first.token
    assert (second.token, second.logprob) == (b"<|im_end|>", -math.inf)
    assert math.isnan(second.top[0].logprob)
    assert answer.outputs[0].cumulative_logprob == -math.inf
    assert not answer.outputs[0].token_ids
    events = await client.events(spec)
    (delta,) = deltas_of(events)
    assert len(delta.logprobs) == 2
    assert not delta.token_ids
    assert events[-2].finished.cumulative_logprob == -math.inf


async def test_bad_words_are_tokenized_at_the_start_and_after_a_space(client, ring):
    tokenizer = client.router._text._tokenizer
    words = ["return", "a rather rare word", "return"]
    await client.events(text_spec(sampling=sampling_pb2.SamplingParams(bad_words=words, bad_token_ids=[7])))
    sampling = ring.calls[0].submit.sampling
    single, several = {7}, set()
    for text in ("return", " return", "a rather rare word", " a rather rare word"):
        ids = tokenizer.encode(text).ids
        if len(ids) == 1:
            single.add(ids[0])
        else:
            several.add(tuple(ids))
    assert len(single) > 1
    assert set(sampling.bad_token_ids) == single
    assert set(sampling.bad_words) == several
    assert several


async def test_no_logprobs_unless_requested(client, ring):
    answer = await client.generate(text_spec())
    assert not answer.outputs[0].HasField("cumulative_logprob")
    assert not answer.outputs[0].logprobs


async def test_timings_if_requested(client, ring):
    spec = text_spec(output=pb.OutputOptions(timings=True))
    timings = (await client.events(spec))[-1].done.timings
    assert 0.25 < timings.queue.ToTimedelta().total_seconds() < 0.25 + 60
    assert timings.prefill.ToMilliseconds() == 500
    assert timings.decode.ToMilliseconds() == 750
    assert 0 < timings.time_to_first_token.ToTimedelta().total_seconds() < 60
    answer = await client.generate(spec)
    assert answer.timings.prefill.ToMilliseconds() == 500
    assert answer.timings.time_to_first_token.ToMilliseconds() >= 750


async def test_each_output_has_its_derived_seed(client, ring):
    answer = await client.generate(text_spec(n=3, sampling=sampling_pb2.SamplingParams(seed=2**64 - 1)))
    assert [output.seed for output in answer.outputs] == [derive_seed(2**64 - 1, i) for i in range(3)]
    assert ring.calls[0].submit.sampling.seed == 2**64 - 1
    assert ring.calls[0].submit.n == 3


async def test_the_matched_stop_is_reported(client, ring):
    async def script(call):
        ends = [end(FinishReason.STOP_STRING, stop_string="x"), end(FinishReason.STOP_TOKEN, stop_token=7)]
        ends += [end(FinishReason.EOS, stop_token=4095), end(FinishReason.TIME_LIMIT)]
        await call.send(*(call.row(0, [1], "", i, ending) for i, ending in enumerate(ends)), start=True)

    ring.script = script
    spec = text_spec(n=4)
    finished = [event.finished for event in await client.events(spec) if event.HasField("finished")]
    outputs = (await client.generate(spec)).outputs
    for ended in (finished, outputs):
        assert [ending.WhichOneof("matched_stop") for ending in ended] == ["stop_string", "stop_token_id", None, None]
        assert (ended[0].stop_string, ended[1].stop_token_id) == ("x", 7)
        assert [ending.finish_reason for ending in ended] == [
            pb.FINISH_REASON_STOP_STRING,
            pb.FINISH_REASON_STOP_TOKEN,
            pb.FINISH_REASON_EOS,
            pb.FINISH_REASON_TIME_LIMIT,
        ]


async def test_the_submit_contains_the_whole_request(client, ring):
    spec = text_spec(
        request_id="r",
        priority=pb.PRIORITY_LOW,
        kv_cache=pb.KvCacheOptions(salt="s"),
        stopping=sampling_pb2.StoppingCriteria(max_tokens=9, min_tokens=2, stop=["a"], stop_token_ids=[8]),
    )
    await client.events(spec)
    await client.events(text_spec(stopping=sampling_pb2.StoppingCriteria(ignore_eos=True)))
    first, second = (call.submit for call in ring.calls)
    assert (first.name, first.priority, first.salt, first.attempt) == ("r", 1, "s", 0)
    assert (first.stopping.max_tokens, first.stopping.min_tokens) == (9, 2)
    assert first.stopping.stop_token_ids == (8,)
    assert first.stopping.eos_token_ids
    assert (first.text.stop, first.text.min_tokens) == (("a",), 2)
    assert first.router == client.router.ring.address
    assert first.detokenizer in ring.detokenizers
    assert second.stopping.max_tokens == 2048 - len(second.prompt)
    assert second.stopping.eos_token_ids == ()


async def test_many_streams_over_several_peers(ring, start):
    for i in range(2):
        ring.add_engine(f"e{i}")
    for i in range(3):
        ring.add_detokenizer(f"d{i}")
    client = await start()

    async def wait_for_all_then_generate(call):
        await client.until(lambda: len(ring.calls) == 64)
        await generate(call)

    ring.script = wait_for_all_then_generate
    answers = await asyncio.gather(*(client.events(text_spec(f"x = {i}")) for i in range(64)))
    by_name = {call.submit.name: call.submit for call in ring.calls}
    for events in answers:
        submit = by_name[events[0].started.request_id]
        tokens = [token_at(submit, 0, i) for i in range(24)]
        assert "".join(delta.text for delta in deltas_of(events)) == text_of(tokens)
    assert all(len(engine.calls) >= 20 for engine in ring.engines.values())
    used = [call.submit.detokenizer for call in ring.calls]
    assert all(used.count(address) >= 10 for address in ring.detokenizers)


async def test_text_released_by_an_end_is_a_separate_delta(client, ring):
    """A client with the tokens but not the end must not have this text: a resumed stream may show a different one."""

    async def script(call):
        last = end(FinishReason.TIME_LIMIT, held="?")
        await call.send(call.row(0, [1], "a"), call.row(1, [2], "b", end=last), start=True)

    ring.script = script
    events = await client.events(text_spec(output=pb.OutputOptions(token_ids=True)))
    assert [(event.delta.text, event.delta.token_offset, event.delta.token_count) for event in events[1:-2]] == [
        ("ab", 0, 2),
        ("?", 2, 0),
    ]
    assert kinds(events)[-2:] == ["finished", "done"]
    (output,) = (await client.generate(text_spec())).outputs
    assert (output.text, output.finish_reason) == ("ab?", pb.FINISH_REASON_TIME_LIMIT)
