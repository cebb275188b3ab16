import json

import pytest

from router.errors import Violations
from router.validate.guide import parse_guide
from router.validate.model import Limits
from sluice.v1.sampling_pb2 import ChoiceList, GuidedDecoding, JsonObject
from sluice.wire.params import Guide, GuideKind

LIMITS = Limits(1, 1)
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
TAG = '{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}'


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
    assert parse_guide(message, LIMITS, bad) == guide
    assert bad.found == []


def test_choices_become_json():
    choices = ['say "yes"', "\n", "ä\\"]
    bad = Violations()
    guide = parse_guide(GuidedDecoding(choice=ChoiceList(choices=choices)), LIMITS, bad)
    assert bad.found == []
    assert guide is not None
    assert (guide.kind, json.loads(guide.text)) == (GuideKind.CHOICE, choices)


def test_every_guide_of_the_proto_is_known():
    names = {field.name for field in GuidedDecoding.DESCRIPTOR.oneofs_by_name["guide"].fields}
    assert names == {kind.value for kind in GuideKind}


def test_errors_of_a_schema_are_not_logged():
    bad = Violations()
    parse_guide(GuidedDecoding(json_schema='{"secret"'), LIMITS, bad)
    assert [violation.private for violation in bad.found] == [True]
