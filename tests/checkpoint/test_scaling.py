"""The grid of an image, computed from its size, is that of transformers' processor."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from sluice.checkpoint.scaling import MAX_ROWS, Grid, Scaling, ScalingError
from tests.examples import examples

PUBLISHED = {"patch_size": 14, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}


@examples(500)
@given(st.integers(1, 6000), st.integers(1, 6000), st.sampled_from([(28, 3136, 1003520), (8, 256, 1920), (6, 1, 36)]))
def test_the_grid_is_that_of_transformers(width, height, numbers):
    assume(max(width, height) <= 200 * min(width, height))
    scaling = Scaling(*numbers)
    lines, columns = (side // scaling.cell for side in smart_resize(height, width, *numbers))
    assert scaling.grid(width, height) == Grid(lines, columns)
    assert lines * columns >= 1


def test_published_limits_are_lowered():
    scaling = Scaling.of(PUBLISHED, {"patch_size": 14})
    assert scaling == Scaling(28, 3136, MAX_ROWS * 28 * 28)
    assert scaling.most == MAX_ROWS
    assert scaling.grid(4096, 4096) == Grid(64, 64)
    assert scaling.grid(1, 1) == Grid(2, 2)


def test_names_of_newer_files():
    size = {"shortest_edge": 784, "longest_edge": 78400}
    assert Scaling.of({"size": size}, {}) == Scaling(28, 784, 78400)
    assert Scaling.of({"size": size, "min_pixels": 1568, "max_pixels": None}, {}) == Scaling(28, 1568, 78400)
    assert Scaling.of({}, {}) == Scaling(28, 3136, 1003520)


@pytest.mark.parametrize(
    ("processor", "tower", "reason"),
    [
        ({"do_resize": False}, {}, "do_resize = false is not supported"),
        ({"patch_size": "14"}, {}, r"patch_size must be a positive integer \(got '14'\)"),
        ({"max_pixels": 0}, {}, r"max_pixels must be a positive integer \(got 0\)"),
        ({"patch_size": 16}, {"patch_size": 14}, "patch_size is 14, but preprocessor_config.json has 16"),
        ({}, {"spatial_merge_size": 4}, "spatial_merge_size is 4, but preprocessor_config.json has 2"),
        ({"min_pixels": 10**9}, {}, "allow no image"),
        ({"max_pixels": 783, "min_pixels": 1}, {}, "allow no image"),
    ],
)
def test_unsupported_values_are_named(processor, tower, reason):
    with pytest.raises(ValueError, match=reason):
        Scaling.of(processor, tower)


def test_images_with_an_extreme_ratio_are_refused():
    scaling = Scaling(28, 3136, 1003520)
    assert scaling.grid(200, 1).rows > 1
    with pytest.raises(ScalingError, match="201 x 1 pixels: one side may be at most 200 times as long"):
        scaling.grid(201, 1)
