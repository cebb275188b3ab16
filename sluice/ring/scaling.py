"""How Qwen2-VL scales an image before it looks at it, and what grid of rows that gives: the arithmetic of transformers'
`smart_resize`, from the size alone."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_ROWS = 4096
"""Of an image: larger ones are scaled down to it, even if the checkpoint allows more. The work of the vision tower
grows with the square of the rows."""
MAX_RATIO = 200
"""Of an image's longer side to its shorter one."""
PATCH, MERGE = 14, 2
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280
"""What files leave out: transformers' defaults."""


class ScalingError(ValueError):
    """An image has no grid; the message says why, after the name of a field."""


class Grid(NamedTuple):
    """Of the rows of an image, line by line."""

    lines: int
    columns: int

    @property
    def rows(self) -> int:
        return self.lines * self.columns


class Scaling(NamedTuple):
    cell: int
    """Pixels of the side of the square that a row stands for."""
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
                given = f"vision_config: {name} is {tower.get(name, default)!r}"
                raise ValueError(f"{given}, but that of preprocessor_config.json is {value}")
        cell, size = patch * merge, processor.get("size")
        size = size if isinstance(size, Mapping) else {}
        # As in transformers, the names of older files count first.
        named = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        named |= {name: processor[name] for name in named if processor.get(name) is not None}
        least = _size(named, "min_pixels", LEAST_PIXELS)
        most = min(_size(named, "max_pixels", MOST_PIXELS), MAX_ROWS * cell**2)
        if not max(least, cell**2) <= most:
            raise ValueError(f"preprocessor_config.json: min_pixels {least} and max_pixels {most} allow no image")
        return Scaling(cell, least, most)

    @property
    def most(self) -> int:
        """Rows of a large square."""
        return self.most_pixels // self.cell**2

    def grid(self, width: int, height: int) -> Grid:
        """Of an image of so many pixels. Raises ScalingError."""
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ScalingError(
                f"has {width} x {height} pixels: one side may be at most {MAX_RATIO} times as long as the other"
            )
        cell, pixels = self.cell, width * height
        lines, columns = round(height / cell), round(width / cell)
        if lines * columns * cell**2 > self.most_pixels:
            by = math.sqrt(pixels / self.most_pixels)
            lines, columns = (max(1, math.floor(side / by / cell)) for side in (height, width))
        elif lines * columns * cell**2 < self.least_pixels:
            by = math.sqrt(self.least_pixels / pixels)
            lines, columns = (math.ceil(side * by / cell) for side in (height, width))
        return Grid(lines, columns)


def _size(raw: Mapping[str, Any], name: str, default: int) -> int:
    found = raw.get(name)
    found = default if found is None else found
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"preprocessor_config.json: {name} must be a positive integer, not {found!r}")
    return found
