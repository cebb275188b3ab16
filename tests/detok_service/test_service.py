"""The service with in-memory lanes: rows in, text out, full lanes, limits, heartbeats."""

import gc

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from detok_service.decoders import decoders_of
from detok_service.router_links import MAX_BATCH_TOKENS
from detok_service.stream import TextStream
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.heartbeats import Hello
from sluice.wire.prompt_logprobs import PART_ROWS, parts, row_bytes
from sluice.wire.requests import Drop
from sluice.wire.rows import PROMPT_END_TOKENS, Started, TextBatch, TokenBatch, TokenLogprob, TokenRow
from tests.detok_service.bench import LENGTH, POISON, Bench, Letters, batch, opened, row
from tests.fakes.tokenizers import sentencepiece


def test_a_stream_from_open_to_end():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), row(1, 0, [1], sequence=1), opens=[opened(1, n=2)]))
    bench.handle(batch(row(1, 1, [2], LENGTH), row(1, 1, [3], sequence=1)))
    bench.handle(batch(row(1, 2, [4], LENGTH, sequence=1)))
    first = bench.lanes["router"].batches[0]
    assert (first.detokenizer, first.started) == ("detok", [Started(1, 1, 5, 2)])
    assert bench.texts() == {(1, 0): ("ac", FinishReason.LENGTH), (1, 1): ("bde", FinishReason.LENGTH)}
    assert len(bench.lanes["router"].batches) == 3
    assert bench.service.streams == 0


@pytest.mark.parametrize("resumed", [0, 1], ids=["first attempt", "resumed"])
def test_every_sequence_continues_the_text_of_the_prompt(resumed):
    tokenizer = sentencepiece()
    the, letter = map(tokenizer.token_to_id, ["▁the", "e"])
    bytes_of_smile = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    for prompt, tokens, text in [
        ([], [the, the], "the the"),
        ([the], [the, the], " the the"),
        # Cut within the first character.
        ([letter, *bytes_of_smile[1:], *bytes_of_smile * 4][-PROMPT_END_TOKENS - 1 : -1], bytes_of_smile[3:], "🙂"),
        ([letter, *bytes_of_smile * 5][-PROMPT_END_TOKENS:], bytes_of_smile, "🙂"),
    ]:
        bench = Bench(new=decoders_of(tokenizer).without_special)
        known = tokens[: resumed * (len(tokens) - 1)]
        given = replace(opened(1, n=2, resume=dict.fromkeys([0, 1], known) if known else {}), prompt_end=prompt)
        rows = [row(1, len(known), tokens[len(known) :], LENGTH, sequence=index) for index in (0, 1)]
        bench.handle(batch(*rows, opens=[given]))
        shown = text[text.rindex(" ") :] if known and " " in text else text
        assert bench.texts() == {(1, index): (shown, FinishReason.LENGTH) for index in (0, 1)}


def test_a_prompt_that_cannot_be_decoded_fails_only_its_own_stream():
    bench = Bench()
    opens = [replace(opened(1), prompt_end=[POISON]), replace(opened(2), prompt_end=[1])]
    bench.handle(batch(row(1, 0, [0], LENGTH), row(2, 0, [0], LENGTH), opens=opens))
    assert bench.texts() == {(1, 0): ("", ErrorCode.TEXT_FAILED), (2, 0): ("a", FinishReason.LENGTH)}


def test_delay_is_from_arrival_to_the_lane_once_per_batch():
    bench = Bench()
    delay = bench.service.delay
    bench.handle(batch(row(1, 0, [0]), row(2, 0, [0]), opens=[opened(1), opened(2)]))
    assert (sum(delay.counts), delay.total) == (2, 0.0)
    # The messages arrived while earlier ones were being handled.
    bench.service.handle([batch(row(1, 1, [0]))], bench.now - 0.25)
    assert (sum(delay.counts), delay.total) == (3, 0.25)
    # The lane is full for two seconds; the oldest row counts.
    bench.lanes["router"].room = 0
    bench.handle(batch(row(1, 2, [0])))
    bench.now += 1
    bench.handle(batch(row(2, 1, [0])))
    assert sum(delay.counts) == 3
    bench.now += 1
    bench.lanes["router"].room = 1
    bench.handle()
    assert (sum(delay.counts), delay.total) == (5, 0.25 + 2 * 2.0)
    bench.now += 60
    bench.lanes["router"].room = 1
    bench.handle(batch(row(1, 3, [0])))
    assert (sum(delay.counts), delay.total) == (6, 0.25 + 2 * 2.0)


def test_a_backlog_is_joined_per_sequence_before_it_is_decoded():
    feeds = []

    class Recording(Letters):
        def feed(self, tokens):
            feeds.append(list(tokens))
            return super().feed(tokens)

    bench = Bench(new=Recording)
    steps = [batch(row(1, i, [i], logprobs=[TokenLogprob(0.0, i, [])]), row(2, i, [i])) for i in range(1, 9)]
    bench.handle(batch(row(1, 0, [0]), row(2, 0, [0]), opens=[opened(1), opened(2)]))
    feeds.clear()
    bench.handle(*steps)
    assert feeds == [[*range(1, 9)]] * 2
    batches = bench.lanes["router"].batches
    assert len(batches) == 2
    assert [(r.offset, r.text) for r in batches[1].rows()] == [(1, "bcdefghi")] * 2
    assert [logprob.rank for logprob in next(batches[1].rows()).logprobs] == [*range(1, 9)]


def test_accepted_drafts_are_counted_once_and_passed_on():
    bench = Bench()
    opens = [opened(1, interval=3), opened(2)]
    bench.handle(batch(row(1, 0, [0]), replace(row(2, 0, [0, 1, 2]), accepted=2), opens=opens))
    bench.handle(batch(replace(row(1, 1, [1, 2]), accepted=1), row(2, 3, [3])))
    counts = [(r.request, r.offset, r.accepted) for sent in bench.lanes["router"].batches for r in sent.rows()]
    assert counts == [(2, 0, 2), (1, 0, 1), (2, 3, 0)]


def test_accepted_drafts_after_a_stop_string_are_not_counted():
    bench = Bench()
    bench.handle(batch(replace(row(1, 0, [0, 1, 2, 3, 4]), accepted=4), opens=[opened(1, stop=["c"])]))
    (text_row,) = (r for text_batch in bench.lanes["router"].batches for r in text_batch.rows())
    assert (text_row.end.reason, len(text_row.tokens), text_row.accepted) == (FinishReason.STOP_STRING, 3, 3)


def test_each_router_gets_the_output_of_its_streams_in_one_batch():
    bench = Bench()
    opens = [opened(request, router=f"router-{request % 3}") for request in range(9)]
    bench.handle(batch(*(row(request, 0, [0]) for request in range(9)), opens=opens))
    for number in range(3):
        (text_batch,) = bench.lanes[f"router-{number}"].batches
        assert text_batch.request == [number, number + 3, number + 6]
        assert [started.request for started in text_batch.started] == text_batch.request


def test_rows_after_a_stop_string_are_dropped():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0, 1, 2]), opens=[opened(1, stop=("b",))]))
    assert bench.texts() == {(1, 0): ("a", FinishReason.STOP_STRING)}
    assert bench.service.streams == 0
    bench.handle(batch(row(1, 3, [3])), batch(row(1, 4, [4])))
    bench.handle(batch(row(1, 5, [], LENGTH)))
    assert bench.texts() == {(1, 0): ("a", FinishReason.STOP_STRING)}
    assert (bench.service.decode_loop.unknown_rows, bench.remembered) == (0, 0)


def test_a_stop_string_and_the_engines_terminal_in_one_batch():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0, 1]), opens=[opened(1, stop=("b",))]), batch(row(1, 2, [2], LENGTH)))
    assert bench.texts() == {(1, 0): ("a", FinishReason.STOP_STRING)}
    assert (bench.service.streams, bench.remembered) == (0, 0)


def test_a_decoding_error_ends_only_its_stream():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), row(2, 0, [0]), opens=[opened(1), opened(2)]))
    with capture_logs() as logs:
        bench.handle(batch(row(1, 1, [POISON]), row(2, 1, [1])))
    bench.handle(batch(row(1, 2, [2], LENGTH), row(2, 2, [2], LENGTH)))
    assert bench.texts() == {(1, 0): ("a", ErrorCode.TEXT_FAILED), (2, 0): ("abc", FinishReason.LENGTH)}
    assert [entry["event"] for entry in logs] == ["text_failed"]


def test_beyond_max_streams_all_sequences_of_a_request_are_refused():
    bench = Bench(max_streams=3)
    bench.handle(batch(row(1, 0, [0]), row(2, 0, [0]), opens=[opened(1, n=2), opened(2, n=2)]))
    bench.handle(batch(row(2, 1, [1]), row(2, 0, [], LENGTH, sequence=1), row(1, 1, [1], LENGTH)))
    assert bench.texts() == {
        (1, 0): ("ab", FinishReason.LENGTH),
        (2, 0): ("", ErrorCode.OVERLOADED),
        (2, 1): ("", ErrorCode.OVERLOADED),
    }
    assert (bench.service.streams, bench.service.decode_loop.unknown_rows) == (1, 0)


def test_a_full_lane_merges_rows_and_delays_no_other_router():
    bench = Bench()
    opens = [opened(request, router=router) for request, router in [(1, "slow"), (2, "slow"), (3, "quick")]]
    bench.handle(batch(opens=opens))
    slow, quick = bench.lanes["slow"], bench.lanes["quick"]
    slow.room = 0
    steps = 200
    for step in range(steps):
        bench.now += 0.001
        end = LENGTH if step == steps - 1 else None
        bench.handle(batch(*(row(request, step, [step % 10], end) for request in (1, 2, 3))))
        assert len(quick.batches) == step + 2
    assert slow.refused == 0
    assert bench.service.waiting == 2
    slow.room = 1 << 60
    bench.now += 1.0
    bench.handle()
    assert bench.service.waiting == 0
    assert len(slow.batches) == 2
    text = "abcdefghij" * (steps // 10)
    assert bench.texts("slow") == {(1, 0): (text, FinishReason.LENGTH), (2, 0): (text, FinishReason.LENGTH)}
    assert bench.texts("quick") == {(3, 0): (text, FinishReason.LENGTH)}


def test_a_message_that_a_lane_does_not_accept_is_kept():
    bench = Bench()
    bench.handle(batch(opens=[opened(1)]))
    lane = bench.lanes["router"]
    lane.room, lane.ready = 0, lambda: lane.refused == 0
    bench.handle(batch(row(1, 0, [0])))
    bench.handle(batch(row(1, 1, [1], LENGTH)))
    assert lane.refused == 1
    lane.room, lane.ready = 9, lambda: True
    bench.handle()
    assert bench.texts() == {(1, 0): ("ab", FinishReason.LENGTH)}


def test_an_invalid_address_affects_no_other_stream():
    bench = Bench()
    bench.handle(Hello("x", "nonsense"), Hello("r", "router"))
    bench.handle(batch(row(1, 0, [0]), row(2, 0, [0], LENGTH), opens=[opened(1, router="nonsense"), opened(2)]))
    assert bench.texts() == {(1, 0): ("", ErrorCode.ROWS_LOST), (2, 0): ("a", FinishReason.LENGTH)}


def test_the_size_of_a_message_is_bounded():
    bench = Bench()
    bench.handle(batch(opens=[opened(request) for request in range(10)]))
    tokens = [1] * (MAX_BATCH_TOKENS // 3)
    bench.handle(batch(*(row(request, 0, tokens) for request in range(10))))
    batches = bench.lanes["router"].batches[1:]
    assert [len(text_batch.request) for text_batch in batches] == [4, 4, 2]
    assert {text for text, _ in bench.texts().values()} == {"b" * len(tokens)}


def test_heartbeats_are_sent_to_routers_that_have_sent_a_hello():
    bench = Bench()
    bench.handle(Hello("r", "router"), batch(row(1, 0, [0, 1, 2]), opens=[opened(1, router="other")]))
    bench.heartbeat(0.0)
    bench.lanes["other"].room = 0
    bench.handle(batch(row(1, 3, [0, 1, 2, 3])), batch(row(1, 7, [0])))
    bench.heartbeat(0.4)
    bench.heartbeat(0.1)
    _, heartbeat = bench.lanes["router"].heartbeats
    assert (heartbeat.detokenizer, heartbeat.epoch, heartbeat.address, heartbeat.draining) == (
        "detok",
        9,
        "inbox",
        False,
    )
    assert (heartbeat.streams, heartbeat.queue_depth, heartbeat.tokens_per_second) == (1, 3, 8.0)
    assert bench.lanes["other"].heartbeats == []
    bench.service.drain()
    bench.service.tick()
    assert bench.lanes["router"].heartbeats[-1].draining


def test_the_rate_is_that_of_the_last_second():
    """As in an engine, so that the same tokens have the same rate in both."""
    bench = Bench()
    bench.handle(Hello("r", "router"))
    bench.heartbeat()
    bench.handle(batch(row(1, 0, [0, 1, 2, 3]), opens=[opened(1)]))
    for _ in range(3):
        bench.heartbeat()
    rates = [heartbeat.tokens_per_second for heartbeat in bench.lanes["router"].heartbeats]
    assert rates == [0.0, 4.0, 4.0, 0.0]


def test_close_ends_live_streams():
    bench = Bench()
    bench.handle(batch(row(1, 0, [0]), opens=[opened(1)]))
    bench.service.close(linger=1.0)
    assert bench.texts() == {(1, 0): ("a", ErrorCode.DRAINING)}
    assert bench.lanes["router"].closed


@pytest.mark.long
@pytest.mark.slow
def test_a_hundred_thousand_live_streams():
    bench = Bench(max_streams=100_000)
    size, requests = 1000, range(100_000)
    for start in requests[::size]:
        slice_ids = range(start, start + size)
        opens = [opened(request) for request in slice_ids]
        bench.handle(batch(*(row(request, 0, [0]) for request in slice_ids), opens=opens, engine="crowd"))
    assert bench.service.streams == 100_000
    bench.heartbeat()
    for start in requests[::size]:
        rows = [row(request, 1, [1], LENGTH) for request in range(start, start + size)]
        bench.handle(batch(*rows, engine="crowd"))
    assert bench.service.streams == 0
    assert bench.remembered == 0
    assert bench.service.waiting == 0
    leaked = [
        gc_object
        for gc_object in gc.get_objects()
        if type(gc_object) is TextStream and gc_object.engine == ("crowd", 1)
    ]
    assert leaked == []
    texts = bench.texts()
    assert set(texts.values()) == {("ab", FinishReason.LENGTH)}
    assert len(texts) == 100_000


def test_ended_streams_leave_no_state_behind():
    bench = Bench(max_streams=10)
    for request in range(50):
        bench.handle(batch(row(request, 0, [1]), opens=[opened(request, stop=("b",))]))
    assert bench.service.streams == 0
    assert bench.remembered == 10


def test_unknown_rows_do_not_accumulate_for_a_router_that_does_not_read(monkeypatch):
    monkeypatch.setattr("detok_service.decode_loop.MAX_ROUTER_ROWS", 10)
    bench = Bench()
    bench.handle(Hello("r", "router"))
    bench.heartbeat()
    lane = bench.lanes["router"]
    lane.room = 0
    for request in range(100):
        bench.handle(batch(row(request, 0, [0]), engine="stranger", epoch=77))
    assert bench.service.waiting == 10
    lane.room = 1 << 30
    bench.heartbeat()
    assert sum(len(text_batch.request) for text_batch in lane.batches) == 10
    assert lane.heartbeats[-1].missed[77] == 90
    assert lane.closed is False


def test_a_prompts_log_probabilities_are_sent_before_the_tokens():
    bench = Bench()
    open_batch = TokenBatch.of("engine", 1, [opened(1), opened(2)], [])
    bench.handle(open_batch)
    bench.lanes["router"].room = 0
    count = MAX_BATCH_TOKENS // PART_ROWS + 1
    first_parts = list(parts(1, 1, 0, 0, bytes(count * PART_ROWS * row_bytes(0))))
    second_parts = list(parts(2, 1, 0, 0, bytes(row_bytes(0))))
    third_parts = list(parts(3, 1, 0, 0, bytes(row_bytes(0))))
    rows = [TokenRow(1, 1, 0, 0, [1], [], None), TokenRow(2, 1, 0, 0, [2], [], None)]
    bench.handle(TokenBatch.of("engine", 1, [], rows, [*first_parts, *second_parts, *third_parts]))
    bench.handle(Drop(2, 1))
    bench.lanes["router"].room = 100
    bench.heartbeat()
    batches = [message for message in bench.lanes["router"].messages if isinstance(message, TextBatch)][-2:]
    assert [len(batch.prompt_logprobs) for batch in batches] == [count - 1, 1]
    assert [part for batch in batches for part in batch.prompt_logprobs] == first_parts
    assert [list(batch.request) for batch in batches] == [[], [1]]
