"""How Qwen2-VL scales an image before encoding, and the resulting grid of rows.

This is the arithmetic of transformers' `smart_resize`, which depends only on the size of the image.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_ROWS = 4096
"""Maximum number of rows of an image. Larger images are scaled down, even if the checkpoint allows more, because the
work of the vision tower grows with the square of the number of rows."""
MAX_RATIO = 200
"""Maximum ratio of an image's longer side to its shorter one."""
PATCH, MERGE = 14, 2
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280
"""transformers' defaults for values that are missing in the checkpoint's files."""


class ScalingError(ValueError):
    """An image cannot be scaled. The message continues a field's name with the reason."""


class Grid(NamedTuple):
    """The grid of an image's rows, which are ordered line by line."""

    lines: int
    columns: int

    @property
    def rows(self) -> int:
        return self.lines * self.columns


class Scaling(NamedTuple):
    cell: int
    """Side length in pixels of the square that a row represents."""
    least_pixels: int
    most_pixels: int

    @staticmethod
    def of(processor: Mapping[str, Any], tower: Mapping[str, Any]) -> "Scaling":
        """`processor`: preprocessor_config.json. `tower`: vision_config. Raises ValueError."""
        if processor.get("do_resize", True) is not True:
            raise ValueError("preprocessor_config.json: do_resize = false is not supported")
        patch, merge = _size(processor, "patch_size", PATCH), _size(processor, "merge_size", MERGE)
        for name, value, default in (("patch_size", patch, PATCH), ("spatial_merge_size", merge, MERGE)):
            if tower.get(name, default) != value:
                raise ValueError(
                    f"vision_config: {name} is {tower.get(name, default)!r}, but preprocessor_config.json has {value}"
                )
        cell, size = patch * merge, processor.get("size")
        size = size if isinstance(size, Mapping) else {}
        # As in transformers, the names of older files take precedence.
        limits = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        limits |= {name: processor[name] for name in limits if processor.get(name) is not None}
        least = _size(limits, "min_pixels", LEAST_PIXELS)
        most = min(_size(limits, "max_pixels", MOST_PIXELS), MAX_ROWS * cell**2)
        if not max(least, cell**2) <= most:
            raise ValueError(f"preprocessor_config.json: min_pixels {least} and max_pixels {most} allow no image")
        return Scaling(cell, least, most)

    @property
    def most(self) -> int:
        """Maximum number of rows of an image."""
        return self.most_pixels // self.cell**2

    def grid(self, width: int, height: int) -> Grid:
        """The grid of an image with this size in pixels. Raises ScalingError."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ScalingError(
                f"has {width} x {height} pixels: one side may be at most {MAX_RATIO} times as long as the other"
            )
        cell, pixels = self.cell, width * height
        lines, columns = round(height / cell), round(width / cell)
        if lines * columns * cell**2 > self.most_pixels:
            factor = math.sqrt(pixels / self.most_pixels)
            lines, columns = (max(1, math.floor(side / factor / cell)) for side in (height, width))
        elif lines * columns * cell**2 < self.least_pixels:
            factor = math.sqrt(self.least_pixels / pixels)
            lines, columns = (math.ceil(side * factor / cell) for side in (height, width))
        return Grid(lines, columns)


def _size(raw: Mapping[str, Any], name: str, default: int) -> int:
    size = raw.get(name)
    size = default if size is None else size
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"preprocessor_config.json: {name} must be a positive integer (got {size!r})")
    return size
