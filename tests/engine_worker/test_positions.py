"""Positions of M-RoPE equal those of transformers, also if they are computed in parts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2VLConfig, Qwen2VLModel

from engine_worker.positions import Positions, SplitImageError
from sluice.wire.tables import Image, PromptTables, Table, VirtualTokens
from tests.examples import examples

VOCAB = 100
PAD = 1


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        text = {"num_hidden_layers": 0, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
        return Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config={"depth": 0, "spatial_merge_size": 2}))


def virtual_of(*images: Image, tables: tuple[Table, ...] = ()) -> VirtualTokens:
    virtual = VirtualTokens.of(VOCAB, PromptTables(tables, images=images))
    assert virtual is not None
    return virtual


def whole(model, prompt: list[int], images: list[Image]) -> tuple[np.ndarray, int]:
    """transformers' positions of the prompt, and the difference between positions and indexes after it."""
    ids = torch.tensor([[PAD if token >= VOCAB else 5 for token in prompt]])
    grids = torch.tensor([[1, 2 * image.rows // image.columns, 2 * image.columns] for image in images])
    positions, deltas = model.get_rope_index(ids, (ids == PAD).int(), grids)
    return positions[:, 0].numpy(), int(deltas)


@examples(100)
@given(st.data())
def test_positions_equal_those_of_transformers(model, data):
    prompt, images, first = [], [], VOCAB
    for _ in range(data.draw(st.integers(1, 4))):
        # With text in between, because transformers treats two adjacent images as one.
        prompt += [5] * data.draw(st.integers(1, 5))
        lines, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        images.append(Image.of(lines * columns, bytes([len(images)]), columns))
        prompt += range(first, first := first + lines * columns)
    prompt += [5] * data.draw(st.integers(0, 5))
    expected, delta = whole(model, prompt, images)
    positions = Positions.of(prompt, virtual_of(*images))
    assert positions is not None
    start = data.draw(st.integers(0, len(prompt) - 1))
    end = data.draw(st.integers(start + 1, len(prompt)))
    assert positions.between(start, end).tolist() == expected[:, start:end].tolist()
    for index in range(len(prompt) + 3):
        behind = positions.behind(index)
        assert behind == (delta if all(token < VOCAB for token in prompt[index:]) else None)


def test_images_out_of_order_and_with_tables():
    table = Table.of(2, 1, "float32", bytes(8))
    one, other = Image.of(4, b"one", 2), Image.of(3, b"other", 3)
    virtual = virtual_of(one, other, tables=(table,))
    prompt = [VOCAB + 1, *range(VOCAB + 6, VOCAB + 9), 5, *range(VOCAB + 2, VOCAB + 6), 7]
    positions = Positions.of(prompt, virtual)
    assert positions is not None
    times, lines, columns = positions.between(0, len(prompt)).tolist()
    assert times == [0, 1, 1, 1, 4, 5, 5, 5, 5, 7]
    assert lines == [0, 1, 1, 1, 4, 5, 5, 6, 6, 7]
    assert columns == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7]


def test_without_grids_there_are_no_positions():
    assert Positions.of([5, 6], None) is None
    assert Positions.of([VOCAB, VOCAB + 1], virtual_of(Image.of(2, b"one"))) is None


@pytest.mark.parametrize("prompt", [[5], [VOCAB], [VOCAB, VOCAB + 2, VOCAB + 1], [VOCAB + 1, VOCAB + 2]])
def test_the_rows_of_an_image_must_be_consecutive(prompt):
    with pytest.raises(SplitImageError, match="must be consecutive"):
        Positions.of(prompt, virtual_of(Image.of(3, b"one", 3)))
