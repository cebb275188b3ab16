"""The operator's functions for tensors: which are accepted, and the rows that they return in a step."""

import sys
from types import SimpleNamespace

import pytest
import torch

from engine_worker.runner.rows import KeptTensors
from engine_worker.runner.tensors import LARGEST_ROW, OutputTensors
from engine_worker.step import Kept, Slice

HERE = "tests.engine_worker.runner.test_tensors"
FORWARD = SimpleNamespace(
    hidden_size=8, hidden_dtype=torch.bfloat16, vocab_size=20, device=torch.device("cpu"), output_layers=(3, 1)
)
no_function = 7


def best_two(hidden, logits):
    return logits.topk(2).indices.int()


def sure(hidden, logits):
    return logits.amax(-1) > 0


def raises(hidden, logits):
    raise RuntimeError("I do not like zeros")


def leaves(hidden, logits):
    sys.exit("I have had enough")


def no_tensor(hidden, logits):
    return 7


def one_row(hidden, logits):
    return logits[:1]


def scalar(hidden, logits):
    return logits.sum()


def doubles(hidden, logits):
    return logits.double()


def no_values(hidden, logits):
    return logits[:, :0]


def large(hidden, logits):
    return torch.zeros(len(logits), LARGEST_ROW + 1, dtype=torch.uint8)


def short_later(hidden, logits):
    return logits if len(logits) == 2 else logits[1:]


def test_sizes_of_rows():
    tensors = OutputTensors.of(FORWARD, {"best": f"{HERE}:best_two", "sure": f"{HERE}:sure"})
    assert tensors.row_bytes == {
        "logits": 80,
        "hidden_states": 16,
        "layers.3": 16,
        "layers.1": 16,
        "best": 8,
        "sure": 1,
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown", "cannot be used"),
        ("no_function", "it is not callable"),
        ("raises", "I do not like zeros"),
        ("leaves", "raised SystemExit: I have had enough"),
        ("no_tensor", "a row per position"),
        ("one_row", "a row per position"),
        ("scalar", "a row per position"),
        ("doubles", "float64"),
        ("no_values", "has 0 bytes"),
        ("large", "8388609 bytes"),
    ],
)
def test_functions_that_are_rejected_at_the_start(name, message):
    with pytest.raises(ValueError, match=f"output_tensors: mine: .*{message}|output_tensors: mine .*{message}"):
        OutputTensors.of(FORWARD, {"mine": f"{HERE}:{name}"})


def test_a_missing_module():
    with pytest.raises(ValueError, match="output_tensors: mine: 'nowhere:f' cannot be used"):
        OutputTensors.of(FORWARD, {"mine": "nowhere:f"})


def test_rows_in_several_calls():
    functions = OutputTensors.of(FORWARD, {"best": f"{HERE}:best_two"}).functions
    kept = Kept(5, 3, ("logits", "best", "hidden_states", "layers.1"), True)
    tensors = KeptTensors([Slice([1, 2, 3, 4], 4, [0], kept=(kept,))], functions)
    logits, hidden = torch.randn(3, 20), torch.randn(3, 8).bfloat16()
    layer = torch.randn(3, 8).bfloat16()
    tensors.add(0, 0, hidden[:2], logits[:2], {1: layer[:2]})
    tensors.add(0, 2, hidden[2:], logits[2:], {1: layer[2:]})
    tensors.finish()
    expected, logits = logits.clone(), logits.zero_()
    (rows,) = tensors.collect()
    assert [(each.name, each.start, each.shape, each.dtype) for each in rows] == [
        ("logits", 5, (2, 20), "float32"),
        ("best", 5, (2, 2), "int32"),
        ("hidden_states", 5, (2, 8), "bfloat16"),
        ("layers.1", 5, (2, 8), "bfloat16"),
        ("logits", 7, (1, 20), "float32"),
        ("best", 7, (1, 2), "int32"),
        ("hidden_states", 7, (1, 8), "bfloat16"),
        ("layers.1", 7, (1, 8), "bfloat16"),
    ]
    # The rows are copies, since the memory of the step may be overwritten.
    assert rows[0].data.tobytes() + rows[4].data.tobytes() == expected.numpy().tobytes()
    assert rows[1].data.tobytes() == expected[:2].topk(2).indices.int().numpy().tobytes()


def test_a_function_that_returns_too_few_rows_fails_its_step():
    tensors = KeptTensors(
        [Slice([1, 2, 3], 0, [0], kept=(Kept(0, 3, ("mine",), True),))],
        OutputTensors.of(FORWARD, {"mine": f"{HERE}:short_later"}).functions,
    )
    with pytest.raises(ValueError, match="'mine' returned 2 rows for 3 positions"):
        tensors.add(0, 0, torch.zeros(3, 8), torch.zeros(3, 20))
