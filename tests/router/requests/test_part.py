"""A request meets only the features that it asks for."""

from dataclasses import dataclass

import pytest

from router.errors import Violations
from router.features import all_features
from router.parse.model import Limits, describe
from router.requests.part import NESTED, Part, parse_parts
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import GenerationSpec, OutputOptions
from sluice.v1.sampling_pb2 import SamplingParams


@dataclass(frozen=True)
class Recording:
    fields: frozenset[str]
    parsed: list[str]

    def parse(self, message, bad):
        self.parsed.extend(sorted(self.fields))
        return Part()


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (GenerationSpec(text="t", sampling=SamplingParams(temperature=0)), []),
        (GenerationSpec(sampling=SamplingParams(logits_processors=["p"])), ["sampling.logits_processors"]),
        (GenerationSpec(output=OutputOptions(prompt_logprobs=0)), ["output.prompt_logprobs"]),
        (GenerationSpec(client_id=0, output=OutputOptions(echo=True)), ["client_id"]),
    ],
    ids=str,
)
def test_only_features_whose_fields_are_set_are_entered(message, asked):
    parsed: list[str] = []
    names = ("sampling.logits_processors", "output.prompt_logprobs", "client_id")
    features = [Recording(frozenset({name}), parsed) for name in names]
    assert len(parse_parts(features, message, Violations())) == len(asked)
    assert parsed == asked


def test_the_fields_of_all_features_exist(checkpoint):
    top = pb.GenerationSpec.DESCRIPTOR
    paths = {field.name for field in top.fields} - set(NESTED)
    paths |= {f"{name}.{inner.name}" for name in NESTED for inner in top.fields_by_name[name].message_type.fields}
    for feature in all_features(describe(checkpoint), Limits(1000, 1000)):
        assert feature.fields
        assert feature.fields <= paths
