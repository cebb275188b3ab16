"""The tensor log compared with a simple model: lists of the received and delivered rows."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from router.requests.appended import Appended
from router.requests.tensor_log import TensorLog
from sluice.wire.tensors import TensorParams
from tests.examples import examples
from tests.fakes.tensors import first_values, tensor_rows

NUM_PROMPT = 9
PARAMS = TensorParams(("a",), ("a", "b"))
KEYS = [(None, "a"), (0, "a"), (0, "b"), (1, "a"), (1, "b")]


class TensorLogMachine(RuleBasedStateMachine):
    """`received` and `delivered`: the number of rows of each tensor that the router and the client have received."""

    @initialize(context=st.integers(0, NUM_PROMPT), output=st.dictionaries(st.integers(0, 1), st.integers(1, 5)))
    def start(self, context, output):
        self.resumed = {key: context if key[0] is None else output.get(key[0], 0) for key in KEYS}
        self.log = TensorLog(TensorParams(("a",), ("a", "b"), context, output), NUM_PROMPT, 2)
        self.received, self.delivered = dict(self.resumed), dict(self.resumed)

    @rule(key=st.sampled_from(KEYS), start=st.integers(0, 20), count=st.integers(1, 8))
    def rows_arrive(self, key, start, count):
        sequence, name = key
        nbytes_before, end = self.log.nbytes, start + count
        part = tensor_rows(start, end, name, sequence=sequence or 0, context=sequence is None)
        appended = self.log.append(part)
        if sequence is None and end > NUM_PROMPT:
            assert appended is Appended.SEEN
        elif start > self.received[key]:
            assert appended is Appended.HOLE
        elif end <= self.received[key]:
            assert appended is Appended.SEEN
        else:
            assert appended is Appended.TAKEN
            self.received[key] = end
            return
        assert self.log.nbytes == nbytes_before

    @rule(sequence=st.integers(0, 1), tokens=st.integers(0, 20))
    def rows_are_taken(self, sequence, tokens):
        taken = list(self.log.take(sequence, tokens))
        for key in [(None, "a"), (sequence, "a"), (sequence, "b")]:
            end = self.received[key] if key[0] is None else max(self.delivered[key], min(self.received[key], tokens))
            parts = [part for part in taken if (part.name, part.context) == (key[1], key[0] is None)]
            assert first_values(parts) == list(range(self.delivered[key], end))
            self.delivered[key] = end

    @rule(sequence=st.integers(0, 1), tokens=st.integers(0, 20))
    def tokens_were_lost(self, sequence, tokens):
        """Keep at least the rows of the tokens that the client has."""
        keys = [(sequence, "a"), (sequence, "b")]
        tokens = max(tokens, *(self.delivered[key] for key in keys))
        self.log.truncate(sequence, tokens)
        for key in keys:
            self.received[key] = min(self.received[key], tokens)

    @rule(sequences=st.sampled_from([(0,), (1,), (0, 1)]))
    def another_attempt_computes_what_is_missing(self, sequences):
        missing = self.log.missing(sequences)
        assert missing.context == (("a",) if self.received[None, "a"] < NUM_PROMPT else ())
        assert missing.context_rows == (self.received[None, "a"] if missing.context else 0)
        least = {index: min(self.received[index, name] for name in "ab") for index in sequences}
        assert missing.output_rows == {index: rows for index, rows in least.items() if rows}

    @rule(sequence=st.integers(0, 1), tokens=st.integers(0, 20))
    def an_end_waits_for_rows(self, sequence, tokens):
        complete = (
            self.received[None, "a"] == NUM_PROMPT and min(self.received[sequence, name] for name in "ab") >= tokens
        )
        assert self.log.is_complete(sequence, tokens) is complete

    @rule()
    def size(self):
        assert self.log.nbytes == sum(8 * (self.received[key] - self.delivered[key]) for key in self.received)


def test_any_order_of_rows():
    run_state_machine_as_test(TensorLogMachine, settings=examples(200))


def test_tensors_that_were_not_requested_are_ignored():
    log = TensorLog(PARAMS, NUM_PROMPT, 1)
    for part in (tensor_rows(0, 1, "other"), tensor_rows(0, 1, "b", context=True), tensor_rows(0, 1, "a", sequence=1)):
        assert log.append(part) is Appended.SEEN
    assert not log.nbytes


@given(st.integers(1, 9))
def test_no_rows_are_kept_without_a_client(rows):
    log = TensorLog(PARAMS, NUM_PROMPT, 1)
    log.append(tensor_rows(0, rows, "a"))
    log.clear()
    assert log.nbytes == 0
    assert log.append(tensor_rows(rows, rows + 1, "a")) is Appended.SEEN
