"""Guided decoding on a real ring: the examples of docs/guided.md, every kind of guide, and errors."""

import json
import re
from pathlib import Path

import pytest

from sluice.client import FinishReason, InvalidRequest
from sluice.executor import GenerationExecutor, GuidedDecodingParams, SamplingParams
from sluice.launch import Ring

PAGE = Path(__file__).parents[2] / "docs" / "guided.md"
TAG = {"structures": [{"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}], "triggers": ["<f"]}
GUIDES = {
    "choice": ({"choice": {"choices": ["yes", "no", "maybe"]}}, "yes|no|maybe"),
    "regex": ({"regex": "[0-9]{3}-[a-z]{2}"}, "[0-9]{3}-[a-z]{2}"),
    "gbnf": ({"ebnf": 'root ::= "a" b{2}\nb ::= [bc]'}, "a[bc]{2}"),
    "lark": ({"ebnf": 'start: "a" B "d"\nB: /[bc]{3}/'}, "a[bc]{3}d"),
    "schema": ({"json_schema": '{"type": "boolean"}'}, "true|false"),
}


@pytest.fixture(scope="module")
def ring():
    with Ring(engines=1, detokenizers=1) as ring:
        yield ring


@pytest.mark.long
def test_the_example_of_the_page_returns_an_object(client):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"client": client, "json": json}
    # `exec` is safe here: the page is part of this repository.
    exec(code, names)
    assert set(names["person"]) == {"name", "age"}
    assert 0 <= names["person"]["age"] <= 150
    assert names["found"].text.lstrip().startswith("{")
    assert names["answer"].text in {"yes", "no"}


@pytest.mark.parametrize("kind", GUIDES)
def test_outputs_match_every_kind_of_guide(client, kind):
    guided, pattern = GUIDES[kind]
    result = client.generate("def f():", guided=guided, n=4, seed=1, max_tokens=48, temperature=1.5)
    for output in result.outputs:
        assert re.fullmatch(pattern, output.text), output.text
        assert output.finish_reason is FinishReason.EOS


def test_json_object_returns_an_object(client):
    result = client.generate("x = ", guided={"json_object": {}}, max_tokens=200, temperature=0, bad_words=["\n"])
    assert result.text.lstrip().startswith("{")
    if result.outputs[0].finish_reason is FinishReason.EOS:
        assert isinstance(json.loads(result.text), dict)


def test_structural_tags_constrain_what_follows_their_trigger(client):
    prompt = "<f>1</f>\n<f>2</f>\n"
    result = client.generate(prompt, guided={"structural_tag": json.dumps(TAG)}, max_tokens=64, seed=2, n=8)
    after_trigger = [part for output in result.outputs for part in output.text.split("<f")[1:]]
    assert len(after_trigger) > 8
    # The last one of an output may be incomplete.
    assert all(">1</f>".startswith(part[:6].replace("2", "1")) for part in after_trigger)


def test_the_structural_tag_of_the_page_works(client):
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    prompt = "<get_weather>{}</get_weather>\n" * 3
    result = client.generate(prompt, guided={"structural_tag": text}, max_tokens=64, seed=2, n=8)
    after_trigger = [part for output in result.outputs for part in output.text.split("<get_")[1:]]
    assert after_trigger
    # The last one of an output may be incomplete.
    assert all("weather>{".startswith(part[:9]) for part in after_trigger)


def test_guided_and_plain_streams_do_not_affect_each_other(client):
    plain = client.generate("import ", max_tokens=24, temperature=0).text
    schema = json.dumps({"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 3, "maxItems": 6})
    streams = [client.stream("[", guided={"json_schema": schema}, seed=i, max_tokens=64) for i in range(6)]
    assert client.generate("import ", max_tokens=24, temperature=0).text == plain
    for stream in streams:
        numbers = json.loads("".join(chunk.text for chunk in stream))
        assert 3 <= len(numbers) <= 6
        assert set(numbers) <= {1, 22, 333}


@pytest.mark.parametrize(
    ("guided", "field"),
    [
        ({"regex": "a("}, "spec.guided.regex"),
        ({"regex": "(?=a)b"}, "spec.guided.regex"),
        ({"ebnf": "root ::= missing"}, "spec.guided.ebnf"),
        ({"json_schema": '{"type": "strange"}'}, "spec.guided.json_schema"),
        ({"structural_tag": "{}"}, "spec.guided.structural_tag"),
    ],
    ids=str,
)
def test_a_guide_that_does_not_compile_is_refused_with_its_field(client, guided, field):
    with pytest.raises(InvalidRequest) as caught:
        client.generate("x", guided=guided)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_a_guide_that_is_too_complex_ends_only_its_own_request(client):
    stream = client.stream("import ", max_tokens=200, temperature=0, ignore_eos=True)
    plain = client.generate("import ", max_tokens=200, temperature=0, ignore_eos=True).text
    guided = {"ebnf": 'root ::= s\ns ::= s s | "a" | "" | s s s'}
    with pytest.raises(InvalidRequest, match="is too complex"):
        client.generate("x", guided=guided, max_tokens=1500, ignore_eos=True)
    assert "".join(chunk.text for chunk in stream) == plain


@pytest.mark.long
def test_the_executor_takes_guides(ring):
    params = SamplingParams(max_tokens=32, guided_decoding=GuidedDecodingParams(json={"enum": ["red", "blue"]}))
    with GenerationExecutor.connect(ring.address) as executor:
        assert json.loads(executor.generate("x", params).outputs[0].text) in ("red", "blue")
