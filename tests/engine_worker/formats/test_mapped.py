from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_worker.formats.mapped import DTYPES, MappedFile
from engine_worker.formats.source import find_weights
from engine_worker.formats.weight import Place
from sluice.checkpoint.errors import CheckpointError

TENSORS = {
    "a.weight": torch.arange(-6, 6, dtype=torch.int8).view(3, 4),
    "b.weight": torch.arange(8, dtype=torch.int8).view(2, 4),
    "c": torch.tensor([[0.5, -2.0]]),
    "d": torch.tensor(3.0, dtype=torch.bfloat16),
    "e": torch.zeros(0, 2),
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Place]:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return {place.name: place for weight in find_weights(tmp_path).values() for place in weight.places}


def test_tensors_are_views_of_the_file(places: dict[str, Place]) -> None:
    mapped = MappedFile(places["c"].file)
    for name, expected in TENSORS.items():
        found = mapped.tensor(places[name])
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        assert mapped.holds(found.data_ptr()) or not found.numel()
    assert not mapped.holds(torch.zeros(1).data_ptr())
    mapped.release()
    assert torch.equal(mapped.tensor(places["a.weight"]), TENSORS["a.weight"])


def test_a_tensor_at_an_odd_address_is_copied(places: dict[str, Place]) -> None:
    # The last byte of the codes, and three of the floats.
    place = places["c"]._replace(start=places["c"].start + 1, shape=(1,), num_bytes=4)
    mapped = MappedFile(place.file)
    found = mapped.tensor(place)
    assert not mapped.holds(found.data_ptr())
    assert torch.equal(found.view(torch.uint8), mapped.bytes_of(place))


def test_a_tensor_outlives_the_object_of_its_file(places: dict[str, Place]) -> None:
    found = MappedFile(places["b.weight"].file).tensor(places["b.weight"])
    assert torch.equal(found, TENSORS["b.weight"])


def test_an_unknown_type_is_named(places: dict[str, Place]) -> None:
    with pytest.raises(CheckpointError, match=r"c has type F6_E2M3, which is not supported; .*F8_E4M3"):
        MappedFile(places["c"].file).tensor(places["c"]._replace(type="F6_E2M3"))


def test_the_names_of_types_are_those_of_the_library(tmp_path: Path) -> None:
    save_file({name: torch.zeros(2, dtype=dtype) for name, dtype in DTYPES.items()}, tmp_path / "model.safetensors")
    places = [place for weight in find_weights(tmp_path).values() for place in weight.places]
    assert {place.name: place.type for place in places} == {name: name for name in DTYPES}
