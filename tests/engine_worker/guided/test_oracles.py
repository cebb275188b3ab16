"""Masks and outputs compared with other implementations: `regex` with partial matches, and jsonschema."""

import json
import random

import jsonschema
import numpy as np
import pytest
import regex

from engine_worker.guided.matchers import compile_guide, load_tokens
from sluice.checkpoint.vocabulary import Vocabulary
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.tools import TOKENIZER_FILE, VOCAB, tokenizer

PATTERNS = [
    "[0-9]{3}-[0-9]{4}",
    "(ab|a)(c|bcd)*d?",
    "[a-z]+( [a-z]+){0,3}\\.",
    "(\\(|\\[)x*(\\)|\\])|y?",
    "a{0,5}b{2,}(cc|cd)+",
    '"([ !#-\\[\\]-~]|\\\\["n])*"',
    "(0|1(01*0)*1)+",
    "if|ifx|else if|import [a-z_]+",
]


@pytest.fixture(scope="module")
def tokens():
    return load_tokens(TOKENIZER_FILE, VOCAB)


def allowed(matcher) -> np.ndarray:
    """The mask as one value per id; the id after the vocabulary is the end."""
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")


@pytest.fixture(scope="module")
def texts() -> list[bytes]:
    """The text of each token; empty for special tokens, which are never text."""
    vocabulary = Vocabulary(tokenizer())
    special = {vocabulary.tokenizer.token_to_id(each) for each in vocabulary.special}
    return [b"" if i in special else vocabulary.bytes_of(i) for i in range(VOCAB)]


def check_masks(tokens, texts: list[bytes], pattern: str, rng: random.Random, max_steps: int = 8) -> None:
    """Compare masks of the whole vocabulary on a random walk."""
    expected = regex.compile(pattern.encode())
    matcher = compile_guide(tokens.tokenizer, Guide(GuideKind.REGEX, pattern))
    output = b""
    for _ in range(max_steps):
        mask = allowed(matcher)
        right = [bool(t) and expected.fullmatch(output + t, partial=True) is not None for t in texts]
        assert mask[:VOCAB].tolist() == right, output
        assert bool(mask[tokens.end]) == (expected.fullmatch(output) is not None), output
        if not any(right):
            break
        token = rng.choice([i for i in range(VOCAB) if right[i]])
        assert matcher.consume_token(token)
        output += texts[token]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_of_expressions(tokens, texts, pattern):
    rng = random.Random(pattern)
    for _ in range(3):
        check_masks(tokens, texts, pattern, rng)


def expression(rng: random.Random, depth: int = 3) -> str:
    """A random expression in the common syntax of both libraries. Every part of it matches some text."""
    kinds = ["text", "class", "digits", *["sequence", "choice", "repeated"] * depth]
    match rng.choice(kinds):
        case "text":
            return "".join(
                rng.choices(["a", "if", " ", "=", "_", r"\.", r"\(", "0", "self", "\n"], k=rng.randrange(1, 4))
            )
        case "class":
            return rng.choice(["[a-z]", "[A-Z_]", "[ -~]", "[+*/-]"])
        case "digits":
            return "[0-9]"
        case "sequence":
            return "".join(expression(rng, depth - 1) for _ in range(rng.randrange(2, 4)))
        case "choice":
            return "(" + "|".join(expression(rng, depth - 1) for _ in range(rng.randrange(2, 4))) + ")"
        case _:
            return f"({expression(rng, depth - 1)})" + rng.choice(["?", "*", "+", "{2}", "{1,3}", "{0,4}"])


def check_expressions(tokens, seeds: range) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        pattern = expression(rng)
        text = output(tokens, Guide(GuideKind.REGEX, pattern), rng, max_steps=100)
        assert text is None or regex.fullmatch(pattern.encode(), text) is not None, pattern


def test_outputs_of_expressions(tokens):
    check_expressions(tokens, range(40))


@pytest.mark.long
def test_outputs_of_many_expressions(tokens):
    check_expressions(tokens, range(1000, 2000))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_masks_of_many_expressions(tokens, texts):
    for seed in range(200):
        rng = random.Random(seed)
        check_masks(tokens, texts, expression(rng), rng, max_steps=4)


def schema(rng: random.Random, depth: int = 3) -> dict:
    """A random schema of the supported keywords."""
    kind = rng.choice(["string", "integer", "number", "boolean", "null", "enum", "const", *["array", "object"] * depth])
    if kind == "string":
        least = rng.randrange(3)
        options = [{"minLength": least, "maxLength": least + rng.randrange(5)}, {"pattern": "^[a-c]{1,4}x?$"}]
        return {"type": "string", **rng.choice([*options, {"format": "date"}, {"format": "uuid"}, {"maxLength": 4}])}
    if kind in ("integer", "number"):
        least = rng.randrange(-50, 50)
        bounds = rng.choice(
            [{}, {"minimum": least, "maximum": least + rng.randrange(1, 90)}, {"exclusiveMinimum": least}]
        )
        return {"type": kind, **bounds}
    if kind == "enum":
        return {"enum": rng.sample(["a", "b\n", "é", 1, 2.5, None, True, [1], {"x": 1}], rng.randrange(1, 5))}
    if kind == "const":
        return {"const": rng.choice(["日本", 0, {"a": [True]}, ""])}
    if kind == "array":
        least = rng.randrange(3)
        return {
            "type": "array",
            "items": schema(rng, depth - 1),
            "minItems": least,
            "maxItems": least + rng.randrange(3),
        }
    if kind == "object":
        return properties(rng, depth)
    return {"type": kind}


def properties(rng: random.Random, depth: int) -> dict:
    names = rng.sample(["a", "b c", "é", "long_name", '"', "d"], rng.randrange(1, 4))
    object_schema = {
        "type": "object",
        "properties": {name: schema(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }
    if rng.random() < 0.3:
        combination = rng.choice(["anyOf", "allOf"])
        return (
            {combination: [object_schema]} if combination == "allOf" else {combination: [object_schema, schema(rng, 1)]}
        )
    return object_schema


def output(tokens, guide: Guide, rng: random.Random, max_steps: int = 400) -> bytes | None:
    """The output of a random walk that ends as soon as it may; None if it does not end."""
    matcher = compile_guide(tokens.tokenizer, guide)
    output_ids = []
    for _ in range(max_steps):
        mask = allowed(matcher)
        if mask[tokens.end]:
            return tokens.tokenizer.decode_bytes(output_ids)
        ids = np.flatnonzero(mask)
        assert len(ids), tokens.tokenizer.decode_bytes(output_ids)
        # Prefer other tokens to white space, which may be repeated.
        ids = [i for i in ids.tolist() if not tokens.tokenizer.decode_bytes([i]).isspace()] or ids.tolist()
        output_ids.append(rng.choice(ids))
        assert matcher.consume_token(output_ids[-1])
    return None


def check_schemas(tokens, seeds: range) -> None:
    ended = 0
    for seed in seeds:
        rng = random.Random(seed)
        document = schema(rng)
        text = output(tokens, Guide(GuideKind.JSON_SCHEMA, json.dumps(document)), rng)
        if text is not None:
            ended += 1
            jsonschema.Draft202012Validator(document).validate(json.loads(text))
    assert ended > 0.9 * len(seeds)


def test_outputs_of_schemas(tokens):
    check_schemas(tokens, range(60))


@pytest.mark.long
def test_outputs_of_many_schemas(tokens):
    check_schemas(tokens, range(1000, 2000))


def test_outputs_of_any_object(tokens):
    for seed in range(5):
        text = output(tokens, Guide(GuideKind.JSON_OBJECT), random.Random(seed))
        assert text is None or isinstance(json.loads(text), dict)


@pytest.mark.parametrize("keyword", ["not", "uniqueItems", "contains", "dependentSchemas", "propertyNames"])
def test_keywords_that_are_not_honoured_are_refused(tokens, keyword):
    value = {"not": {"type": "null"}, "uniqueItems": True, "dependentSchemas": {"a": {}}}.get(keyword, {"maxLength": 1})
    kind = "array" if keyword in ("uniqueItems", "contains") else "object"
    with pytest.raises(ValueError, match=keyword):
        compile_guide(tokens.tokenizer, Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": kind, keyword: value})))
