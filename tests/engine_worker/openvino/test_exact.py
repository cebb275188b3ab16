"""The test at load finds how many tokens a pass may have, and whether bits ever change."""

import pytest

from engine_worker.models.registry import model_class
from engine_worker.openvino.compiled import Precision
from engine_worker.openvino.exact import Exact, find_exact, wide
from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.openvino.passes import LEAST_TOKENS
from engine_worker.openvino.trial import Shape
from sluice import tiny_model
from tests.engine_worker.models.checkpoints import open_written

PLAIN = Precision()
LARGER = 1 + 1e-6


@pytest.fixture(scope="module")
def config():
    raw = open_written(tiny_model.path()).config
    return model_class(raw).read_config(raw)


@pytest.fixture
def change(monkeypatch):
    """Change the logits of passes by their number of tokens and the lengths of the sequences before them."""
    infer = OpenVinoForward._infer

    def install(changes) -> None:
        def changed(forward, num_rows):
            logits = infer(forward, num_rows)
            tokens, _, past, *_ = forward._buffers
            return logits * LARGER if changes(len(tokens), past) else logits

        monkeypatch.setattr(OpenVinoForward, "_infer", changed)

    return install


@pytest.mark.parametrize(("largest", "tokens"), [(600, 512), (255, 128), (127, 96), (80, LEAST_TOKENS)])
def test_passes_are_as_long_as_bits_do_not_change(config, change, largest, tokens):
    change(lambda count, _: count > largest)
    assert find_exact.__wrapped__(Shape(config), PLAIN, 1) == Exact(True, tokens)


def test_kernels_that_change_bits_in_the_shortest_passes_are_not_exact(config, change):
    change(lambda count, _: count > 40)
    assert find_exact.__wrapped__(Shape(config), PLAIN, 1) == Exact(False, LEAST_TOKENS)


def test_kernels_whose_bits_depend_on_other_sequences_are_not_exact(config, change):
    change(lambda _, past: len(past) > 1 and past[-1] > 150)
    assert not find_exact.__wrapped__(Shape(config), PLAIN, 1).exact


def test_the_tested_layers_are_as_wide_as_the_models(config):
    tested = wide(Shape(config)).config
    assert (tested.hidden_size, tested.intermediate_size, tested.heads) == (
        config.hidden_size,
        config.intermediate_size,
        config.heads,
    )
    assert tested.num_layers == 1 < config.num_layers
