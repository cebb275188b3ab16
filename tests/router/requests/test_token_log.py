import asyncio

from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from router.requests.token_log import Appended, RequestLog
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.prompt_logprobs import PromptLogprobs
from sluice.wire.rows import End, Started, TextRow, Times
from tests.fakes.memory_ring import prompt_rows

STARTED = Started(1, 0, 3, 0)
TIMES = Times(0, 0, 0)


def row(offset, tokens, text="", end=None, sequence=0):
    return TextRow(1, 0, sequence, offset, list(tokens), [], text, end)


def started(n=1):
    log = RequestLog(n)
    log.start(STARTED)
    return log


@given(st.lists(st.integers(0, 3), max_size=20), st.randoms())
def test_each_token_is_appended_once_although_rows_are_repeated(sizes, random):
    """Rows arrive in order, interspersed with repetitions of earlier rows."""
    log, rows, offset = started(), [], 0
    for size in sizes:
        rows.append(row(offset, range(offset, offset + size), "x" * size))
        offset += size
        assert log.append(rows[-1]) is Appended.TAKEN
        repeated = random.choice(rows)
        if repeated.tokens:
            assert log.append(repeated) is Appended.SEEN
    assert log.sequences[0].ids.tolist() == list(range(offset))
    assert "".join(log.sequences[0].text) == "x" * offset


def test_accepted_drafts_count_once():
    log = started()
    for text_row in (row(0, [1, 2, 3])._replace(accepted=2), row(3, [4])):
        log.append(text_row)
        log.append(text_row)
    assert log.sequences[0].accepted == 2


def test_gaps_and_rows_that_cannot_be_split():
    log = started()
    log.append(row(0, [1, 2], "ab"))
    assert log.append(row(3, [4])) is Appended.HOLE
    assert log.append(row(1, [2, 3], "bc")) is Appended.HOLE
    assert log.append(row(0, [1, 2], "ab")) is Appended.SEEN
    assert RequestLog(1).append(row(0, [1])) is Appended.HOLE


def test_nothing_is_appended_after_the_end():
    log = started()
    log.append(row(0, [1], "a", End(FinishReason.EOS, TIMES)))
    assert log.complete
    assert log.append(row(1, [2], "b")) is Appended.SEEN
    log.finish(FinishReason.ABORTED)
    log.fail(RequestError(ErrorCode.INTERNAL, "late"))
    assert log.fault is None
    assert log.sequences[0].end.reason is FinishReason.EOS


def test_nothing_is_appended_after_a_fault():
    """A request that is handed back is also cancelled, which must not look like an end to a reader that is writing."""
    log = started(n=2)
    log.append(row(0, [1], "a"))
    log.fail(RequestError(ErrorCode.DRAINING, "the router is draining"))
    for sequence, offset in ((0, 1), (1, 0)):
        assert log.append(row(offset, [], "", End(FinishReason.ABORTED, TIMES), sequence)) is Appended.SEEN
    assert not log.complete
    assert [sequence_log.end for sequence_log in log.sequences] == [None, None]


def test_a_closed_log_keeps_nothing():
    log = started()
    log.append(row(0, [1], "a"))
    log.close()
    assert log.append(row(1, [2], "b")) is Appended.SEEN
    assert log.next_updated() is None
    assert not log.sequences[0].text


def test_a_sequence_is_listed_as_updated_once():
    log = started(2)
    for offset in range(3):
        log.append(row(offset, [1], "a"))
    log.append(row(0, [1], "a", sequence=1))
    assert [log.next_updated().index for _ in range(2)] == [0, 1]
    assert log.next_updated() is None


async def test_the_reader_wakes_once_for_many_rows():
    log = RequestLog(1)
    waiting = asyncio.ensure_future(log.changed())
    await asyncio.sleep(0)
    log.start(STARTED)
    log.append(row(0, [1]))
    log.fail(RequestError(ErrorCode.INTERNAL, "x"))
    await asyncio.wait_for(waiting, 1)


def scored(start: int, rows: int, top: int = 0) -> PromptLogprobs:
    return PromptLogprobs(1, 0, start, top, prompt_rows(start, rows))


def test_the_prompts_logprobs_are_part_of_the_start():
    log = started()
    log.expect_prompt_logprobs(5, 0)
    assert not log.can_start
    assert log.append(row(0, [1])) is Appended.HOLE
    assert log.append_prompt_logprobs(scored(0, 2)) is Appended.TAKEN
    assert log.append_prompt_logprobs(scored(0, 2)) is Appended.SEEN
    assert log.append_prompt_logprobs(scored(3, 1)) is Appended.HOLE
    assert log.append_prompt_logprobs(scored(2, 4)) is Appended.HOLE
    assert log.append_prompt_logprobs(scored(1, 4)) is Appended.TAKEN
    assert log.can_start
    assert [(logprob, rank) for logprob, rank, _ in log.prompt.rows()] == [(-float(i), i + 1) for i in range(5)]
    assert log.append(row(0, [1])) is Appended.TAKEN


def test_the_prompts_logprobs_come_from_one_model():
    """An attempt without a token leaves nothing behind, because the next one may use a different model."""
    log = started()
    log.expect_prompt_logprobs(3, 0)
    log.append_prompt_logprobs(scored(0, 3))
    log.forget_start()
    assert not log.prompt.complete
    log.start(STARTED)
    log.append_prompt_logprobs(scored(0, 3))
    log.mark_start_delivered()
    log.forget_start()
    assert log.can_start
    assert log.append_prompt_logprobs(scored(0, 3)) is Appended.SEEN


def test_the_end_of_a_request_without_the_prompts_logprobs():
    log = started()
    log.expect_prompt_logprobs(3, 0)
    assert log.append(row(0, [], end=End(FinishReason.ABORTED, TIMES))) is Appended.TAKEN
    assert log.complete
