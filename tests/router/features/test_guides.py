import asyncio
import json

import pytest

from router.errors import Violations
from router.features.guides import Guides
from router.parse.model import Limits
from router.requests.token_log import RequestLog
from sluice.v1.generation_pb2 import GenerationSpec
from sluice.v1.sampling_pb2 import ChoiceList, GuidedDecoding, JsonObject
from sluice.wire.params import Guide, GuideKind

LIMITS = Limits(1, 1)
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
TAG = '{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}'


def parse(message: GuidedDecoding, bad: Violations) -> Guide | None:
    part = asyncio.run(Guides(LIMITS).parse(GenerationSpec(guided=message), bad, ""))
    return None if part is None else part.submitted(RequestLog(1))["guide"]


@pytest.mark.parametrize(
    ("message", "guide"),
    [
        (GuidedDecoding(), None),
        (GuidedDecoding(json_object=JsonObject()), Guide(GuideKind.JSON_OBJECT)),
        (GuidedDecoding(json_schema=SCHEMA), Guide(GuideKind.JSON_SCHEMA, SCHEMA)),
        (GuidedDecoding(regex="[{"), Guide(GuideKind.REGEX, "[{")),
        (GuidedDecoding(ebnf='root ::= "a"'), Guide(GuideKind.EBNF, 'root ::= "a"')),
        (GuidedDecoding(structural_tag=TAG), Guide(GuideKind.STRUCTURAL_TAG, TAG)),
    ],
    ids=str,
)
def test_guides_are_passed_on_unchanged(message, guide):
    bad = Violations()
    assert parse(message, bad) == guide
    assert bad.found == []


def test_choices_become_json():
    choices = ['say "yes"', "\n", "ä\\"]
    bad = Violations()
    guide = parse(GuidedDecoding(choice=ChoiceList(choices=choices)), bad)
    assert bad.found == []
    assert guide is not None
    assert (guide.kind, json.loads(guide.text)) == (GuideKind.CHOICE, choices)


def test_every_guide_of_the_proto_is_known():
    names = {field.name for field in GuidedDecoding.DESCRIPTOR.oneofs_by_name["guide"].fields}
    assert names == {kind.value for kind in GuideKind}


def test_errors_of_a_schema_are_not_logged():
    bad = Violations()
    parse(GuidedDecoding(json_schema='{"secret"'), bad)
    assert [violation.private for violation in bad.found] == [True]


def test_a_schema_that_is_too_deep_is_not_called_invalid():
    bad = Violations()
    deep = '{"a":' * 3000 + "1" + "}" * 3000
    parse(GuidedDecoding(json_schema=deep), bad)
    (found,) = bad.found
    assert (found.field, found.description) == ("spec.guided.json_schema", "is nested too deeply")
