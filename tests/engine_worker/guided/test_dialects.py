"""Each kind of guide: the outputs that match, and errors of invalid guides."""

import json

import pytest

from sluice.wire.errors import ErrorCode
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.tools import END, allowed, followed, ids, mask, prepared, texts

pytestmark = pytest.mark.process

TAGS = {"structures": [{"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f="]}
NESTED = {"a": [1, {"b": []}], "c": {}}
WRITTEN = [
    json.dumps(NESTED, separators=(",", ":")),
    json.dumps(NESTED),
    *(json.dumps(NESTED, indent=indent) for indent in (0, 2, 4, "\t")),
    json.dumps(NESTED, indent=2).replace("\n", "\r\n"),
]
"""JSON as programs write it."""
CASES = [
    (GuideKind.JSON_OBJECT, "", ["{}", '{"a": [1, null]}'], ["[]", "1", "{", "{}x"]),
    (GuideKind.JSON_SCHEMA, '{"enum": ["a", 2]}', ['"a"', "2"], ["a", "22", '"2"']),
    (GuideKind.JSON_OBJECT, "", WRITTEN, ['{"a":  1}', '{"a" \n: 1}', '{"a": 1\n\n}', '{"a":\n%s1}' % (" " * 21)]),
    (GuideKind.JSON_SCHEMA, "{}", ["[\n%s1]" % ("\t" * 20)], ["[  1]"]),
    (GuideKind.JSON_SCHEMA, '{"x-guidance": {"lenient": true}}', ["[1]"], ["[  1]"]),
    (GuideKind.JSON_SCHEMA, '{"x-guidance": {"whitespace_pattern": " *"}}', ["[%s1]" % (" " * 100)], ["[\n1]"]),
    (GuideKind.JSON_SCHEMA, '{"x-guidance": {"whitespace_flexible": false}}', ["[1]"], ["[ 1]"]),
    (GuideKind.REGEX, "a|bc/d", ["a", "bc/d"], ["b", "abc/d", "xa", "a\n"]),
    (GuideKind.EBNF, 'root ::= "a" root | "b"', ["b", "aab"], ["a", "ba"]),
    (GuideKind.EBNF, 'start: "a" start | "b"', ["b", "aab"], ["a", "ba"]),
    (GuideKind.CHOICE, '["yes", "y.s", "\\"(", "", "é\\n#&~-/"]', ["yes", "y.s", '"(', "", "é\n#&~-/"], ["yxs", "ye"]),
    (
        GuideKind.STRUCTURAL_TAG,
        json.dumps(TAGS),
        ["", "free\ntext", "a <f=a>1</f> b <f=a>1</f>"],
        ["<f=b", "<f=a>2</f>", "<f=a>1</f"],
    ),
    (GuideKind.STRUCTURAL_TAG, json.dumps({**TAGS, "type": "structural_tag"}), ["free"], ["<f=a>2</f>"]),
    (GuideKind.EBNF, 'start: "[temperature=1]" | a\na: "b"', ["[temperature=1]", "b"], ["a"]),
    (
        GuideKind.STRUCTURAL_TAG,
        '{"structures": [{"begin": "<f>", "schema": {"type": "array"}, "end": ""}], "triggers": ["<f>"]}',
        ["<f>[ 1]"],
        ["<f>[  1]"],
    ),
    (GuideKind.EBNF, 'start: "// %json" %json {"items": {}} /x/', ["// %json[ 1]x"], ["// %json[  1]x"]),
    (GuideKind.EBNF, 'start: %json{"x-guidance": {"whitespace_flexible": false}}', ["[1]"], ["[ 1]"]),
    (GuideKind.EBNF, '// %json {\nstart: %json {"uniqueItems": false, "format": "int32"}', ["[1]"], []),
    (GuideKind.REGEX, r"\d\w\s", ["1a ", "2_\n"], ["١a ", "1é ", "1a\u00a0"]),
    (GuideKind.REGEX, r"(?x)[^\D] \W \S [\s,]", ["1é,\t", "1-é "], ["١-a ", "1aa ", "1- ,", "1-a\u00a0"]),
    (GuideKind.REGEX, r"\\d|\p{Nd}", ["\\d", "١"], ["\\1"]),
    (GuideKind.EBNF, r'start: /[\d-]+/ "\\d" /\w/', ["1-2\\da"], ["١\\da", "1\\dé"]),
    (GuideKind.JSON_SCHEMA, r'{"pattern": "^\\d\\w$"}', ['"1a"'], ['"١a"', '"1é"']),
    *(
        (GuideKind.JSON_SCHEMA, json.dumps({"type": "string", "format": name}), ['"a"'], ["1"])
        for name in ("password", "uri-reference", "byte", "binary", "iri", "regex", "no-such")
    ),
    (GuideKind.JSON_SCHEMA, '{"type": "integer", "format": "int32"}', ["1"], ['"a"']),
    (GuideKind.JSON_SCHEMA, '{"type": "string", "format": "date"}', ['"2026-01-31"'], ['"a"']),
    (GuideKind.JSON_SCHEMA, '{"items": {"type": "integer"}, "minItems": 1.0, "maxItems": 2.0}', ["[1]"], ["[]"]),
    (GuideKind.JSON_SCHEMA, '{"type": "string", "minLength": 1.0, "maxLength": 2.0}', ['"a"'], ['""', '"aaa"']),
    (GuideKind.JSON_SCHEMA, '{"enum": [1.0]}', ["1"], ["2"]),
    (GuideKind.JSON_SCHEMA, '{"const": 1.0}', ["1"], ["2", "1.5"]),
    (GuideKind.JSON_SCHEMA, '{"type": "integer", "const": 1.0}', ["1"], ["2"]),
    (
        GuideKind.JSON_SCHEMA,
        '{"items": {"type": "integer", "minimum": 1.0, "maximum": 3.0}}',
        ["[1,3]"],
        ["[0]", "[4]"],
    ),
    (GuideKind.JSON_SCHEMA, '{"items": {"type": "integer", "multipleOf": 2.0}}', ["[2]"], ["[3]"]),
    (GuideKind.JSON_SCHEMA, '{"items": {"minimum": 1.0, "type": "number"}}', ["[1,1.5]"], ["[0]", "[0.9]"]),
    (
        GuideKind.JSON_SCHEMA,
        '{"items": {"type": "integer", "exclusiveMinimum": 1.0, "exclusiveMaximum": 3.0}}',
        ["[2]"],
        ["[1]", "[3]"],
    ),
    (
        GuideKind.JSON_SCHEMA,
        '{"uniqueItems": false, "propertyNames": {}, "not": false, "unevaluatedProperties": true}',
        ["[1,1]", '{"a":1}'],
        [],
    ),
    (
        # Names of properties and constants, not keywords.
        GuideKind.JSON_SCHEMA,
        '{"properties": {"uniqueItems": false, "format": {"const": {"format": "x", "maxItems": 1.5}}}}',
        ['{"format":{"format":"x","maxItems":1.5}}'],
        ['{"uniqueItems":1}', '{"format":{}}'],
    ),
]


@pytest.mark.parametrize(("kind", "text", "right", "wrong"), CASES)
def test_outputs_that_match(guides, kind, text, right, wrong):
    guide = Guide(kind, text)
    for output in right:
        (sequence,) = followed(guides, guide)
        assert END in allowed(mask(guides, sequence, ids(output))), output
    for output in wrong:
        (sequence,) = followed(guides, guide)
        masked = mask(guides, sequence, ids(output))
        assert masked.fault is not None or END not in allowed(masked), output


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GuideKind.JSON_SCHEMA, "{", "Expecting property name"),
        (GuideKind.JSON_SCHEMA, "[]", "must be a JSON object, not list"),
        (GuideKind.JSON_SCHEMA, '{} | "x"', "Extra data"),
        (GuideKind.JSON_SCHEMA, '{"not": {}}', 'Unimplemented keys: ["not"]'),
        (GuideKind.JSON_SCHEMA, '{"uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        (GuideKind.JSON_SCHEMA, '{"type": "array", "minItems": 1.5}', "Expected positive integer for 'minItems'"),
        (GuideKind.EBNF, 'start: %json {"a": }', "Expecting value"),
        (GuideKind.JSON_SCHEMA, '{"type": "strin"}', "Invalid type: strin"),
        (GuideKind.JSON_SCHEMA, '{"$ref": "#"}', "no text matches it"),
        (GuideKind.REGEX, "(a", "unclosed group"),
        (GuideKind.REGEX, "(?=a)b", "look-around"),
        (GuideKind.EBNF, "start: other", "other"),
        (GuideKind.EBNF, "root ::= other", "other"),
        (GuideKind.EBNF, 's ::= "a"', "root"),
        (GuideKind.CHOICE, "[]", "at least one"),
        (GuideKind.CHOICE, '["a", 1]', "array of at least one string"),
        (GuideKind.EBNF, "start: a\na[temperature=0.5]: /[a-z]+/", "rule a must not set a temperature"),
        (GuideKind.STRUCTURAL_TAG, "{}", "triggers must be"),
        (
            GuideKind.STRUCTURAL_TAG,
            json.dumps({**TAGS, "at_least_one": True}),
            "the object has 'at_least_one', which is not",
        ),
        (GuideKind.STRUCTURAL_TAG, json.dumps({**TAGS, "type": "json"}), 'type must be "structural_tag"'),
        (
            GuideKind.STRUCTURAL_TAG,
            json.dumps({**TAGS, "structures": [{**TAGS["structures"][0], "strict": True}]}),
            "structures[0] has 'strict', which is not one of begin, schema, end",
        ),
        (GuideKind.STRUCTURAL_TAG, json.dumps({**TAGS, "triggers": ["<g"]}), "must start with one of the triggers"),
        (GuideKind.STRUCTURAL_TAG, json.dumps({"structures": [1], "triggers": ["<g"]}), "structures[0] must be"),
    ],
)
def test_invalid_guides_are_refused(guides, kind, text, message):
    fault = prepared(guides, Guide(kind, text))
    assert fault.error_code is ErrorCode.INVALID_ARGUMENT
    assert fault.field == f"spec.guided.{kind.value}"
    assert message in fault.message
    assert len(fault.message) < 700


def test_literals_stand_for_special_tokens_that_are_shown(guides):
    """As in a required tool call, if <tool_call> is a special token of the model."""
    text = 'start: "<|im_start|>" "<|x|>" /[a-z]/ "<|im_end|>"i?'
    token, literal = [4094, *ids("<|x|>a")], [*ids("<"), *ids("|im_start|><|x|>a")]
    for shown, right, wrong in ((("<|im_start|>", "<|x|>"), token, literal), ((), literal, token)):
        guide = Guide(GuideKind.EBNF, text, shown)
        (sequence,) = followed(guides, guide)
        assert END in allowed(mask(guides, sequence, right))
        (sequence,) = followed(guides, guide)
        masked = mask(guides, sequence, wrong)
        assert masked.fault is not None or END not in allowed(masked)


def test_the_longer_of_two_literals_has_precedence(guides):
    """docs/guided.md documents this."""
    (sequence,) = followed(guides, Guide(GuideKind.EBNF, 'root ::= [a-z] root | "self"'))
    assert texts(mask(guides, sequence, ids("se"))) == {"l"}
