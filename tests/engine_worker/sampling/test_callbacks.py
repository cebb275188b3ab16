"""Logits processors in a user's program: their arguments, and what happens if one misbehaves."""

import gc
import logging
import math
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine_worker.sampling.callbacks import Callback, CallbackError
from engine_worker.sampling.processors import Processors, find_processors
from engine_worker.sampling.program import Processing
from engine_worker.step import Drawn
from sluice.executor.callbacks import Callbacks, module_name
from sluice.ring import callbacks as wire
from sluice.ring.descriptors import raise_limit
from sluice.ring.errors import ErrorCode
from sluice.settings.engine import BATCHED, ProcessorNames
from tests.engine_worker.sampling.test_processors import VOCAB, greedy, run
from tests.fakes.callback_processors import steer
from tests.fakes.processes import LIMIT, wait_until

SHORT = 0.2


@pytest.fixture
def serve() -> Iterator:
    """An engine's processors that call functions which are served here."""
    served = Callbacks()

    def make(batched=None, *, seconds=LIMIT, warnings=None, **named) -> Processors:
        found = served.settings(named, batched)
        names = ProcessorNames(**found, logits_processor_timeout=seconds)
        return find_processors(names, lambda event, reason: None if warnings is None else warnings.append(reason))

    yield make
    served.close()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def faults(found) -> list[str | None]:
    return [each.fault and each.fault.message for each in found]


def test_a_callback_gets_the_arguments_of_an_imported_processor(serve, logits) -> None:
    calls = []

    def nine(request_id, scores, token_ids, stream, client_id):
        assert (scores.shape, scores.dtype) == ((1, 1, VOCAB), torch.float32)
        calls.append((request_id, [list(ids) for ids in token_ids], stream, client_id))
        calls.append(scores[0, 0].clone())
        scores[0, 0, torch.arange(VOCAB) != 9] = -math.inf

    draws = [*greedy(), *greedy(["nine"], output=[3, 4]), *greedy()]
    found = run(logits, draws, [0, 1, 2], serve(nine=nine), {1: 2}, before=[5, 6, 8])
    assert [each.token for each in found] == [logits[0].argmax(), 9, logits[2].argmax()]
    assert calls[0] == ("job", [[1, 2, 3, 4, 8]], None, 7)
    assert torch.equal(calls[1], logits[1])


def test_the_batched_one_is_called_once_for_all(serve, logits) -> None:
    calls = []

    def batched(ids, scores, token_ids, stream, client_ids):
        calls.append((ids, [list(each[0]) for each in token_ids], stream, client_ids))
        for number, each in enumerate(scores):
            each[0, 0] = -math.inf
            each[0, 0, 5 + number] = 0.0

    draws = [*greedy([BATCHED]), *greedy(), *greedy([BATCHED], output=[3])]
    found = run(logits, draws, [0, 1, 2], serve(batched))
    assert [each.token for each in found] == [5, int(logits[1].argmax()), 6]
    assert calls == [(["job"] * 2, [[1, 2], [1, 2, 3]], None, [7] * 2)]


def test_a_call_sends_only_new_tokens(serve, monkeypatch) -> None:
    seen: list[list[int]] = []
    sent: list[int] = []
    encode = wire.Frames.send

    def spy(self, header, *arguments):
        if isinstance(header, wire.Call):
            sent.append(len(header.sequences[0].tokens))
        encode(self, header, *arguments)

    monkeypatch.setattr(wire.Frames, "send", spy)
    processor = serve(see=lambda _id, _logits, ids, *_: seen.append(list(ids[0]))).named["see"]
    tokens = list(range(1000))
    row = torch.zeros(1, 1, VOCAB)
    expected = []
    for step in range(20):
        processor("job", row, [tokens], None, None)
        expected.append(list(tokens))
        if step % 3 == 2:
            # The step that sampled the last token has failed.
            tokens[-1] += 1
        tokens.append(step)
    assert seen == expected
    assert sent == [1000] + [2] * 19
    # Another sequence, which may have the same request id.
    processor("job", row, [list(range(5))], None, None)
    assert (seen[-1], sent[-1]) == (list(range(5)), 5)


def test_both_sides_forget_the_same_sequences(serve, monkeypatch) -> None:
    monkeypatch.setattr(wire, "MAX_SEQUENCES", 3)
    monkeypatch.setattr(wire, "MAX_TOKENS", 60)
    seen: list[list[int]] = []

    def see(_ids, _logits, token_ids, *_):
        seen.extend(list(ids[0]) for ids in token_ids)

    processor = serve(see).batched
    generator = torch.Generator().manual_seed(3)
    sequences = [list(range(size)) for size in (5, 10, 20, 30, 40, 7)]
    for _ in range(60):
        chosen = torch.randperm(6, generator=generator)[:4].tolist()
        seen.clear()
        processor(["x"] * 4, [torch.zeros(1, 1, 2)] * 4, [[sequences[i]] for i in chosen], None, [None] * 4)
        assert seen == [sequences[i] for i in chosen]
        for i in chosen:
            sequences[i].append(len(sequences[i]))


def test_a_callback_that_raises_ends_only_its_sequence(serve, logits, caplog) -> None:
    def broken(*_):
        raise KeyError("a secret")

    warnings: list[str] = []
    draws = [*greedy(["broken", "broken"]), *greedy(), *greedy([BATCHED]), *greedy(["works"])]
    processors = serve(broken, broken=broken, works=lambda *_: None, warnings=warnings)
    with caplog.at_level(logging.WARNING, "sluice.executor"):
        found = run(logits, draws, [0, 1, 2, 3], processors)
    assert faults(found) == [
        "the logits processor 'broken' raised KeyError",
        None,
        "the logits processor 'batched' raised KeyError",
        None,
    ]
    assert found[0].fault.error_code == ErrorCode.PROCESSOR_FAILED
    assert warnings == [f"{name} raised KeyError: 'a secret'" for name in ("broken", BATCHED)]
    # The program's log has the traceback, for the author of the function.
    assert [record.exc_info[0] for record in caplog.records] == [KeyError, KeyError]


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


@pytest.mark.parametrize("error", [SystemExit(3), MuteError()])
def test_the_thread_survives_any_exception(serve, logits, error) -> None:
    def once(*_):
        if error is not None:
            raise errors.pop()

    errors = [error]
    processors = serve(once=once)
    assert faults(run(logits, greedy(["once"]), [0], processors)) == [
        f"the logits processor 'once' raised {type(error).__name__}"
    ]
    errors = [ValueError("again")]
    assert faults(run(logits, greedy(["once"]), [0], processors)) == ["the logits processor 'once' raised ValueError"]


def test_a_callback_that_hangs_delays_the_engine_once(serve, logits) -> None:
    release, started, warnings = threading.Event(), [], []

    def hangs(request_id, scores, *_):
        started.append(request_id)
        assert release.wait(LIMIT)
        scores.fill_(-math.inf)
        scores[0, 0, 4] = 0.0

    processors = serve(hangs=hangs, seconds=SHORT, warnings=warnings)
    found = run(logits, [*greedy(["hangs"]), *greedy(), *greedy(["hangs"])], [0, 1, 2], processors)
    assert faults(found) == [
        "the logits processor 'hangs' did not answer within 0.2 s",
        None,
        "the logits processor 'hangs' has not returned from an earlier call",
    ]
    assert started == ["job"]
    # Other functions are not delayed.
    assert faults(run(logits, greedy(["works"]), [0], serve(works=lambda *_: None))) == [None]
    release.set()
    # Its late answer is discarded.
    assert wait_until(lambda: run(logits, greedy(["hangs"]), [1], processors)[0] == Drawn(4))


@pytest.mark.parametrize("data", [torch.zeros(3), torch.zeros(1, 1, VOCAB, dtype=torch.float64)])
def test_a_callback_that_changes_the_shape_or_type_of_the_logits(serve, logits, data) -> None:
    def reshapes(_id, scores, *_):
        scores.data = data

    warnings: list[str] = []
    found = run(logits, [*greedy(["reshapes"]), *greedy()], [0, 1], serve(reshapes=reshapes, warnings=warnings))
    assert faults(found) == ["the logits processor 'reshapes' raised ValueError", None]
    changed, required = f"{list(data.shape)} {data.dtype}", f"[1, 1, {VOCAB}] torch.float32"
    assert f"it changed the logits to {changed}; they must stay {required}" in warnings[0]


def test_a_callback_that_replaces_the_memory_of_the_logits(serve, logits) -> None:
    def other(_id, scores, *_):
        scores.data = torch.arange(VOCAB, dtype=torch.float32).flip(0).view(1, 1, VOCAB)

    assert run(logits, greedy(["other"]), [0], serve(other=other))[0].token == 0


def test_a_callback_that_returns_logits_instead_of_changing_them(serve, logits) -> None:
    def returns(_id, scores, *_):
        return scores - math.inf

    def all_new(_ids, scores, *_):
        scores[:] = [torch.zeros(1, 1, VOCAB)]

    found = run(logits, [*greedy(["returns"]), *greedy([BATCHED])], [0, 1], serve(all_new, returns=returns))
    assert [each.token for each in found] == [logits[0].argmax(), logits[1].argmax()]


def test_a_callback_that_changes_its_token_ids(serve, logits) -> None:
    def clears(_id, _scores, token_ids, *_):
        token_ids[0].clear()

    warnings: list[str] = []
    processors = serve(clears=clears, warnings=warnings)
    draws = greedy(["clears"], output=[3])
    assert faults(run(logits, draws, [0], processors)) == [None]
    assert faults(run(logits, draws, [0], processors)) == ["the logits processor 'clears' raised ValueError"]
    assert "it changed the token ids" in warnings[0]


def test_a_callback_that_bans_every_token(serve, logits) -> None:
    found = run(logits, greedy(["nothing"]), [0], serve(nothing=lambda _id, scores, *_: scores.fill_(math.nan)))
    assert found[0].fault.error_code == ErrorCode.NOTHING_TO_SAMPLE


def test_a_program_that_does_not_listen(tmp_path, logits) -> None:
    processors = find_processors(ProcessorNames({"gone": f"ipc://{tmp_path}/gone"}), lambda *_: None)
    found = run(logits, [*greedy(["gone"]), *greedy()], [0, 1], processors)
    assert faults(found) == ["the logits processor 'gone' cannot be reached", None]


@pytest.mark.parametrize("answer", [b"", b"\x00" * 5, wire.SIZES.pack(2, 0) + b"\xc1\xc1", wire.SIZES.pack(1 << 31, 0)])
def test_an_invalid_answer(tmp_path, answer) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()

        def answers() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=answers, daemon=True)
        thread.start()
        callback = Callback.of(f"ipc://{tmp_path}/socket", LIMIT)
        for _ in range(2):
            with pytest.raises(CallbackError) as caught:
                callback.one("job", torch.zeros(1, 1, 4), [[1]], None, None)
            assert caught.value.outcome == "cannot be reached"
        thread.join(LIMIT)


def test_several_engines_call_one_function_in_turn(logits) -> None:
    inside: list[int] = []
    most: list[int] = []

    def count(_id, scores, *_):
        inside.append(1)
        most.append(len(inside))
        scores += 1.0
        inside.pop()

    served = Callbacks()
    names = ProcessorNames(**served.settings({"count": count}, None))
    engines = [find_processors(names, lambda *_: None) for _ in range(4)]
    results: list[list[str | None]] = []

    def engine(processors) -> None:
        for _ in range(50):
            results.append(faults(run(logits, greedy(["count"]), [0], processors)))

    threads = [threading.Thread(target=engine, args=(each,)) for each in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[None]] * 200
    assert most == [1] * 200
    served.close()


def test_a_descriptor_above_1024(serve, logits) -> None:
    if raise_limit() < 2048:
        pytest.skip("this process may not have so many")
    files = [os.dup(0) for _ in range(1024)]
    try:
        assert faults(run(logits, greedy(["works"]), [0], serve(works=lambda *_: None))) == [None]
    finally:
        for file in files:
            os.close(file)


def test_closing_leaves_no_folder_or_thread(logits) -> None:
    served = Callbacks()
    found = served.settings({"left": lambda *_: None}, None)
    folder = Path(found["logits_processors"]["left"].removeprefix("ipc://")).parent
    processors = find_processors(ProcessorNames(**found), lambda *_: None)
    assert faults(run(logits, greedy(["left"]), [0], processors)) == [None]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    del processors
    served.close()
    assert wait_until(lambda: not [each for each in threading.enumerate() if "processor left" in each.name])
    del served
    gc.collect()
    assert not folder.exists()


def test_which_functions_an_engine_can_import() -> None:
    def nested() -> None: ...

    assert module_name(steer) == "tests.fakes.callback_processors:steer"
    assert module_name(math.floor) == "math:floor"
    for function in (nested, lambda: None, [].append, Processing.of, torch.no_grad()(steer)):
        assert module_name(function) is None


def test_a_value_that_is_not_callable() -> None:
    with pytest.raises(TypeError, match=r"the logits processor 'x' must be a function or .* \(got 7\)"):
        Callbacks().settings({"x": 7}, None)
    assert Callbacks().settings({"x": "a:b"}, "c:d") == {
        "logits_processors": {"x": "a:b"},
        "logits_processor_batched": "c:d",
    }
