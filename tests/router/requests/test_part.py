"""A request meets only the features that it asks for."""

from dataclasses import dataclass

import pytest

from router.errors import Violations
from router.parse.model import Limits, describe
from router.requests.part import CHAT_PARTS, NESTED, Part, parse_parts
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import ChatMessage, ChatPrompt, ContentPart, GenerationSpec, OutputOptions
from sluice.v1.sampling_pb2 import SamplingParams
from tests.fakes.features import make_features


def chat(*messages):
    return GenerationSpec(chat=ChatPrompt(messages=messages))


@dataclass(frozen=True)
class Recording:
    fields: frozenset[str]
    parsed: list[str]

    async def parse(self, message, bad, tenant):
        self.parsed.extend(sorted(self.fields))
        return Part()


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (GenerationSpec(text="t", sampling=SamplingParams(temperature=0)), []),
        (GenerationSpec(sampling=SamplingParams(logits_processors=["p"])), ["sampling.logits_processors"]),
        (GenerationSpec(output=OutputOptions(prompt_logprobs=0)), ["output.prompt_logprobs"]),
        (GenerationSpec(client_id=0, output=OutputOptions(echo=True)), ["client_id"]),
        (chat(ChatMessage(content="a"), ChatMessage(content="b")), []),
        (chat(ChatMessage(content="a"), ChatMessage(parts=[ContentPart(text="b")])), [CHAT_PARTS]),
        (GenerationSpec(text="t", model="tiny"), []),
        (GenerationSpec(text="t", model="sql"), ["model"]),
    ],
    ids=str,
)
async def test_only_features_whose_fields_are_set_are_entered(message, asked):
    parsed: list[str] = []
    names = ("sampling.logits_processors", "output.prompt_logprobs", "client_id", CHAT_PARTS, "model")
    features = [Recording(frozenset({name}), parsed) for name in names]
    assert len(await parse_parts(features, message, "tiny", Violations())) == len(asked)
    assert parsed == asked


def test_the_fields_of_all_features_exist(checkpoint):
    top = pb.GenerationSpec.DESCRIPTOR
    paths = {field.name for field in top.fields} - set(NESTED)
    paths |= {f"{name}.{inner.name}" for name in NESTED for inner in top.fields_by_name[name].message_type.fields}
    paths.add(CHAT_PARTS)
    for feature in make_features(describe(checkpoint), Limits(1000, 1000)):
        assert feature.fields
        assert feature.fields <= paths
