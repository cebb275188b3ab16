"""Checkpoints whose config.json ties the head to the embedding, but whose files say otherwise; as transformers reads
them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine_worker.models.decoder import EMBEDDING, TIED, CausalLM
from engine_worker.runner.weight_file import Rename, opened
from sluice.checkpoint.folder import weight_files

ROWS = 4096
"""Rows of a matrix that are compared at once."""


def resolve_tied(model: CausalLM, folder: Path, rename: Rename) -> Rename:
    """Gives the model a head of its own if the files contain one with other values than the embedding. The result is
    `rename`, which also maps the head to the embedding if the files contain only the head."""
    if not model.config.tie_word_embeddings:
        return rename
    places = _places(folder, rename)
    if TIED not in places:
        return rename
    if EMBEDDING not in places:
        return lambda name: EMBEDDING if rename(name) == TIED else rename(name)
    if not _equal(places[TIED], places[EMBEDDING]):
        model.untie()
    return rename


class Place(NamedTuple):
    file: Path
    name: str


def _places(folder: Path, rename: Rename) -> Mapping[str | None, Place]:
    """Where the files contain each tensor of the model."""
    places: dict[str | None, Place] = {}
    for file in weight_files(folder):
        with opened(file) as tensors:
            places |= {rename(name): Place(file, name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
    return places


def _equal(one: Place, other: Place) -> bool:
    with opened(one.file) as first, opened(other.file) as second:
        pair = first.get_slice(one.name), second.get_slice(other.name)
        return pair[0].get_shape() == pair[1].get_shape() and all(
            torch.equal(*(matrix[start : start + ROWS].float() for matrix in pair)) for start in _starts(pair[0])
        )


def _starts(matrix: Any) -> Iterator[int]:
    yield from range(0, matrix.get_shape()[0], ROWS)
