"""Logits processors in a user's program: their arguments, and which functions can be used."""

import gc
import math
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from engine_worker.sampling.processors import Processing, find_processors
from sluice.executor.callbacks import Callbacks, module_name
from sluice.host.descriptors import raise_limit
from sluice.settings.engine import BATCHED, ProcessorNames
from sluice.wire import callbacks as wire
from tests.engine_worker.sampling.processor_tools import VOCAB, faults, greedy, run
from tests.fakes.callback_processors import steer
from tests.fakes.processes import wait_until


def test_a_callback_gets_the_arguments_of_an_imported_processor(serve, logits) -> None:
    calls = []

    def nine(request_id, scores, token_ids, stream, client_id):
        assert (scores.shape, scores.dtype) == ((1, 1, VOCAB), torch.float32)
        calls.append((request_id, [list(ids) for ids in token_ids], stream, client_id))
        calls.append(scores[0, 0].clone())
        scores[0, 0, torch.arange(VOCAB) != 9] = -math.inf

    draws = [*greedy(), *greedy(["nine"], output=[3, 4]), *greedy()]
    results = run(logits, draws, [0, 1, 2], serve(nine=nine), {1: 2}, before=[5, 6, 8])
    assert [each.token for each in results] == [logits[0].argmax(), 9, logits[2].argmax()]
    assert calls[0] == ("job", [[1, 2, 3, 4, 8]], None, 7)
    assert torch.equal(calls[1], logits[1])


def test_the_batched_callback_is_called_once_for_all_requests(serve, logits) -> None:
    calls = []

    def batched(ids, scores, token_ids, stream, client_ids):
        calls.append((ids, [list(each[0]) for each in token_ids], stream, client_ids))
        for number, each in enumerate(scores):
            each[0, 0] = -math.inf
            each[0, 0, 5 + number] = 0.0

    draws = [*greedy([BATCHED]), *greedy(), *greedy([BATCHED], output=[3])]
    results = run(logits, draws, [0, 1, 2], serve(batched))
    assert [each.token for each in results] == [5, int(logits[1].argmax()), 6]
    assert calls == [(["job"] * 2, [[1, 2], [1, 2, 3]], None, [7] * 2)]


def test_a_call_sends_only_new_tokens(serve, monkeypatch) -> None:
    seen: list[list[int]] = []
    sent: list[int] = []
    encode = wire.Frames.send

    def spy(self, header, *arguments):
        if isinstance(header, wire.CallbackCall):
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


def test_a_callback_that_replaces_the_memory_of_the_logits(serve, logits) -> None:
    def other(_id, scores, *_):
        scores.data = torch.arange(VOCAB, dtype=torch.float32).flip(0).view(1, 1, VOCAB)

    assert run(logits, greedy(["other"]), [0], serve(other=other))[0].token == 0


def test_a_callback_that_returns_logits_instead_of_changing_them(serve, logits) -> None:
    def returns(_id, scores, *_):
        return scores - math.inf

    def all_new(_ids, scores, *_):
        scores[:] = [torch.zeros(1, 1, VOCAB)]

    results = run(logits, [*greedy(["returns"]), *greedy([BATCHED])], [0, 1], serve(all_new, returns=returns))
    assert [each.token for each in results] == [logits[0].argmax(), logits[1].argmax()]


def test_several_engines_call_one_function_in_turn(logits) -> None:
    inside: list[int] = []
    concurrent: list[int] = []

    def count(_id, scores, *_):
        inside.append(1)
        concurrent.append(len(inside))
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
    assert concurrent == [1] * 200
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
    settings = served.settings({"left": lambda *_: None}, None)
    folder = Path(settings["logits_processors"]["left"].removeprefix("ipc://")).parent
    processors = find_processors(ProcessorNames(**settings), lambda *_: None)
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
