"""A real engine writes the arrays of each step, within limits, and errors of the file system end no step."""

import itertools
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine_worker.runner.debug_tensors import DebugTensors
from sluice import tiny_model
from sluice.settings.engine import DEBUG_INPUTS, DebugOptions
from sluice.wire.params import SamplingParams
from tests.parity.harness import EngineHarness

ALL = (*DEBUG_INPUTS, "logits")
GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(range(10, 30))


def options(folder: Path, *names: str, **limits) -> DebugOptions:
    return DebugOptions(names or ALL, str(folder), **limits)


def read(folder: Path) -> list[dict[str, np.ndarray]]:
    """The steps of the engine named e, in order."""
    steps = sorted((folder / "e").glob("iteration_*"), key=lambda path: int(path.name.partition("_")[2]))
    return [{path.stem: np.load(path, allow_pickle=False) for path in step.iterdir()} for step in steps]


def generate(settings: DebugOptions, prompts: list[list[int]], max_tokens: int, **options) -> list[list[int]]:
    debug = DebugTensors(settings, "e", lambda *_: None)
    with closing(EngineHarness(tiny_model.path(), kv_cache_tokens=2048, debug=debug, **options)) as engine:
        return engine.generate(prompts, GREEDY, max_tokens)


@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_each_step_has_its_own_arrays(tmp_path, backend, overlap):
    if backend == "openvino":
        pytest.importorskip("openvino")
    (output,) = generate(options(tmp_path), [PROMPT], 5, overlap=overlap, backend=backend)
    # With overlap a step for a token after the end may have been launched.
    first, *others = read(tmp_path)[:5]
    assert set(first) == set(ALL)
    assert first["input_ids"].tolist() == PROMPT
    assert first["position_ids"].tolist() == list(range(20))
    assert [each["input_ids"].tolist() for each in others] == [[token] for token in output[:4]]
    assert [each["sequence_length"].tolist() for each in (first, *others)] == [[20 + i] for i in range(5)]
    assert [each["host_past_key_value_lengths"].tolist() for each in others] == [[20 + i] for i in range(4)]
    assert [each["last_token_ids"].tolist() for each in (first, *others)] == [[20], [1], [1], [1], [1]]
    assert [each["logits"].argmax(-1).tolist() for each in (first, *others)] == [[token] for token in output]


def test_with_two_ranks_rank_0_writes(tmp_path):
    (output,) = generate(options(tmp_path), [PROMPT], 3, tensor_parallel=2)
    steps = read(tmp_path)
    assert [each["input_ids"].tolist() for each in steps] == [PROMPT, [output[0]], [output[1]]]
    assert [each["logits"].argmax(-1).tolist() for each in steps] == [[token] for token in output]


def test_several_sequences_and_chunks(tmp_path):
    prompts = [PROMPT, PROMPT[:3]]
    long_output, short_output = generate(options(tmp_path), prompts, 3, max_tokens_per_step=16, max_batch_size=2)
    fed = {len(PROMPT): [*PROMPT, *long_output[:2]], 3: [*PROMPT[:3], *short_output[:2]]}
    written: dict[int, dict[int, int]] = {20: {}, 3: {}}
    for step in read(tmp_path):
        starts = [0, *step["last_token_ids"].tolist()]
        parts = [step["input_ids"][i:j].tolist() for i, j in itertools.pairwise(starts)]
        for ids, past, length in zip(parts, step["host_past_key_value_lengths"], step["sequence_length"], strict=True):
            assert past + len(ids) == length
            prompt_length = next(
                size for size, tokens in fed.items() if tokens[past:length] == ids and past == len(written[size])
            )
            written[prompt_length].update(enumerate(ids, int(past)))
    assert {size: list(tokens.values()) for size, tokens in written.items()} == fed


def test_the_newest_steps_are_kept(tmp_path):
    generate(options(tmp_path, "sequence_length", debug_max_steps=2), [PROMPT], 6)
    assert [step["sequence_length"].tolist() for step in read(tmp_path)] == [[24], [25]]


def test_the_size_is_limited(tmp_path):
    row = 4 * 4096
    generate(options(tmp_path, "logits", debug_max_size=3 * row), [PROMPT], 6)
    assert len(read(tmp_path)) == 3
    generate(options(tmp_path, "logits", debug_max_size=1), [PROMPT], 6)
    assert len(read(tmp_path)) == 1


def test_the_steps_of_an_earlier_process_are_removed(tmp_path):
    (tmp_path / "e" / "iteration_7").mkdir(parents=True)
    (tmp_path / "e" / "notes").mkdir()
    (tmp_path / "f" / "iteration_7").mkdir(parents=True)
    DebugTensors(options(tmp_path), "e", lambda *_: None)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")) == ["e/notes", "f/iteration_7"]


def test_an_error_stops_the_writing_and_no_request(tmp_path):
    warnings = []
    debug = DebugTensors(options(tmp_path), "e", lambda *warning: warnings.append(warning))
    with closing(EngineHarness(tiny_model.path(), kv_cache_tokens=2048, debug=debug)) as engine:
        (expected,) = engine.generate([PROMPT], GREEDY, 4)
        assert read(tmp_path)
        shutil.rmtree(tmp_path / "e")
        (tmp_path / "e").write_text("in the way")
        assert engine.generate([PROMPT], GREEDY, 4) == [expected]
    assert [event for event, _ in warnings] == ["debug_tensors_failed"]


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"debug_folder: .*/file cannot be used"):
        DebugTensors.of(options(tmp_path / "file"), "e", lambda *_: None)
    assert DebugTensors.of(DebugOptions(), "e", lambda *_: None) is None
