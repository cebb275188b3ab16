"""Closed objects: no properties that the schema does not list, unless it says otherwise."""

import json

import pytest

from engine_worker.guided.matchers import compile_guide, load_tokens
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.tools import END, TOKENIZER_FILE, VOCAB, allowed, followed, ids, make, mask

B = {"properties": {"b": {"properties": {"c": {}}}}}
A_AND_B = {"$defs": {"B": B}, "allOf": [{"$ref": "#/$defs/B"}, {"properties": {"a": {}}}]}
"""Each part would refuse the other's properties."""
A_OR_B = {"$defs": {"B": B}, "anyOf": [{"$ref": "#/$defs/B"}, {"properties": {"a": {}}}]}


@pytest.fixture(scope="module")
def tokens():
    return load_tokens(TOKENIZER_FILE, VOCAB)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"properties": {"a": B}}, ['{"a":{"b":{"c":1}}}'], ['{"z":1}', '{"a":{"z":1}}', '{"a":{"b":{"z":1}}}']),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}, ['{"z":1}'], ['{"z":""}']),
        ({"properties": {"additionalProperties": {}}}, ['{"additionalProperties":1}'], ['{"z":1}']),
        ({"type": "object"}, ['{"z":1}'], []),
        ({"const": {"properties": {"a": 1}}}, ['{"properties":{"a":1}}'], ['{"properties":{}}']),
        ({"properties": {"a": {"$ref": "#"}}}, ['{"a":{"a":{}}}'], ['{"a":{"z":1}}']),
        (A_AND_B, ['{"b":{"c":1},"a":1}', '{"z":1}'], ['{"b":{"z":1}}']),
        (A_OR_B, ['{"a":1}', '{"b":{"c":1}}'], ['{"b":{"z":1}}', '{"z":1}']),
        ({**A_OR_B, "properties": {"d": {}}}, ['{"d":1,"a":1}', '{"z":1}'], []),
    ],
)
def test_objects_are_closed_unless_the_schema_says_otherwise(tokens, schema, right, wrong):
    matcher = compile_guide(tokens.tokenizer, Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)), close=True)
    for text in [*right, *wrong]:
        copy = matcher.deep_copy()
        assert (copy.try_consume_tokens(ids(text)) == len(ids(text)) and copy.is_accepting()) == (text in right), text


@pytest.mark.process
@pytest.mark.parametrize("closed", [False, True])
def test_the_setting_applies_to_the_guide_processes(closed):
    guides = make(guided_closed_objects=closed)
    try:
        for guide in (
            Guide(GuideKind.JSON_SCHEMA, json.dumps(B)),
            Guide(GuideKind.EBNF, f"start: %json {json.dumps(B)}"),
        ):
            (sequence,) = followed(guides, guide)
            result = mask(guides, sequence, ids('{"z":1}'))
            assert (result.fault is None and END in allowed(result)) is not closed
    finally:
        guides.close()
