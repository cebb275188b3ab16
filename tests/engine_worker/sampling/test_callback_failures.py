"""Logits processors in a user's program that raise, hang, return invalid results or cannot be reached."""

import logging
import math
import socket
import threading

import pytest
import torch

from engine_worker.sampling.callbacks import Callback, CallbackError
from engine_worker.sampling.processors import find_processors
from engine_worker.step import Drawn
from sluice.settings.engine import BATCHED, ProcessorNames
from sluice.wire import callbacks as wire
from sluice.wire.errors import ErrorCode
from tests.engine_worker.sampling.processor_tools import VOCAB, faults, greedy, run
from tests.fakes.processes import LIMIT, wait_until

SHORT = 0.2


def test_a_callback_that_raises_ends_only_its_sequence(serve, logits, caplog) -> None:
    def broken(*_):
        raise KeyError("a secret")

    warnings: list[str] = []
    draws = [*greedy(["broken", "broken"]), *greedy(), *greedy([BATCHED]), *greedy(["works"])]
    processors = serve(broken, broken=broken, works=lambda *_: None, warnings=warnings)
    with caplog.at_level(logging.WARNING, "sluice.executor"):
        results = run(logits, draws, [0, 1, 2, 3], processors)
    assert faults(results) == [
        "the logits processor 'broken' raised KeyError",
        None,
        "the logits processor 'batched' raised KeyError",
        None,
    ]
    assert results[0].fault.error_code == ErrorCode.PROCESSOR_FAILED
    assert warnings == [f"{name} raised KeyError: 'a secret'" for name in ("broken", BATCHED)]
    # The program's log has the traceback, for the author of the function.
    assert [record.exc_info[0] for record in caplog.records] == [KeyError, KeyError]


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), MuteError()])
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
    results = run(logits, [*greedy(["hangs"]), *greedy(), *greedy(["hangs"])], [0, 1, 2], processors)
    assert faults(results) == [
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
    results = run(logits, [*greedy(["reshapes"]), *greedy()], [0, 1], serve(reshapes=reshapes, warnings=warnings))
    assert faults(results) == ["the logits processor 'reshapes' raised ValueError", None]
    changed, required = f"{list(data.shape)} {data.dtype}", f"[1, 1, {VOCAB}] torch.float32"
    assert f"it changed the logits to {changed}; they must stay {required}" in warnings[0]


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
    results = run(logits, greedy(["nothing"]), [0], serve(nothing=lambda _id, scores, *_: scores.fill_(math.nan)))
    assert results[0].fault.error_code == ErrorCode.NOTHING_TO_SAMPLE


def test_a_program_that_does_not_listen(tmp_path, logits) -> None:
    processors = find_processors(ProcessorNames({"gone": f"ipc://{tmp_path}/gone"}), lambda *_: None)
    results = run(logits, [*greedy(["gone"]), *greedy()], [0, 1], processors)
    assert faults(results) == ["the logits processor 'gone' cannot be reached", None]


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
