"""What the LoRA adapter of a request asks of an engine and of this router."""

import asyncio

import pytest

from router.errors import RequestError, Violations
from router.features.lora import Lora
from router.parse.model import describe
from sluice.v1.generation_pb2 import GenerationSpec, LoraWeights
from sluice.wire.adapters import Adapter
from tests.fakes.features import Known

SQL = Adapter("sql", "0" * 32, "/sql")


class Loads:
    """Sends files to one engine."""

    def __init__(self, engine: str) -> None:
        self.sends = engine, SQL.version

    def is_supplying(self, engine, version):
        return (engine, version) == self.sends


@pytest.fixture(scope="module")
def served(checkpoint):
    return describe(checkpoint)


def part_of(served, *, in_requests=True, **fields):
    adapters = Known({"sql": SQL})
    adapters.loads = Loads("busy")
    bad = Violations()
    part = asyncio.run(Lora(served, adapters, in_requests).parse(GenerationSpec(text="t", **fields), bad, ""))
    bad.raise_if_any()
    return part


@pytest.mark.parametrize("fields", [{"lora_id": "sql"}, {"model": "sql"}], ids=str)
def test_an_engine_accepts_it_once_it_has_the_files(served, fields):
    part = part_of(served, **fields)
    assert part.adapter == SQL
    assert not part.accepted_by("busy")
    assert part.accepted_by("idle")


def test_a_request_that_resumes_without_an_adapter_has_no_part(served):
    assert part_of(served, resume=[{"token_ids": [1]}]) is None


def test_files_are_hashed_and_refused_where_they_are_not_allowed(served):
    weights = LoraWeights(config_json=b"{}", safetensors=b"x")
    part = part_of(served, lora_weights=weights)
    assert part.versions() == {"adapter": part.files.version}
    with pytest.raises(RequestError) as error:
        part_of(served, in_requests=False, lora_weights=weights)
    assert error.value.code.name == "FORBIDDEN"


def test_a_name_that_nobody_serves_is_refused(served):
    with pytest.raises(RequestError) as error:
        part_of(served, model="other")
    assert error.value.code.name == "MODEL_NOT_FOUND"
