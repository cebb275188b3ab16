"""Hostile chats and hostile templates end with an error, after little time and memory."""

import json
import time
import tracemalloc

import pytest

from router.errors import RequestError
from router.parse.chat import ChatPrompt
from router.text.bounds import MAX_ITEMS
from router.text.chat_template import ChatTemplate
from sluice.checkpoint.errors import CheckpointError

LIMIT = 1 << 20
MEMORY = 24 * LIMIT
SECONDS = 5.0
"""Twice as long as a rendering may take, which the probes and the rendering itself use up."""

DEEP_LIST = "[" * 40 + ",".join("1" * 100) + "]" * 40
WIDE_TOOLS = [{"a": json.loads(DEEP_LIST)}] * 1000
"""About 250 kB of JSON, but 17 MB with indentation."""


def chat(text: str = "x", tools: list[dict] | None = None, **variables: object) -> ChatPrompt:
    return ChatPrompt(
        messages=({"role": "user", "content": text},),
        size=len(text),
        tools=tools,
        variables=variables,
        continue_final_message=False,
        add_generation_prompt=True,
        add_special_tokens=False,
        largest_field="spec.chat.tools_json",
    )


def refused(source: str, prompt: ChatPrompt, limit: int = LIMIT) -> tuple[str, str]:
    """Field and description of the error, checked to come soon and with little memory."""
    tracemalloc.start()
    began = time.thread_time()
    try:
        template = ChatTemplate(source, {}, max_characters=limit)
        with pytest.raises(RequestError) as error:
            template.render(prompt)
        assert time.thread_time() - began < 4 * SECONDS
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    return error.value.violations[0][:2]


@pytest.mark.parametrize("source", ["{{ tools | tojson(indent=4) }}", "{% set x = tools | tojson(indent=4) %}"])
def test_json_of_tools_is_bounded_while_it_is_written(source):
    field, description = refused(source, chat(tools=WIDE_TOOLS))
    assert (field, description) == (
        "spec.chat.tools_json",
        f"is more than {LIMIT} characters when rendered, the limit",
    )


def test_the_text_of_a_template_is_bounded_while_it_is_written():
    source = "{% for a in x %}{% for b in x %}{{ tools }}{{ messages[0].content }}{% endfor %}{% endfor %}"
    _, description = refused(source, chat("x" * 10_000, [{}], x=[1] * 1000))
    assert description.endswith("the limit")


def repeated(statement: str, first: str) -> str:
    """A template that repeats a statement about the variable n.a, which doubles its size."""
    return f"{{% set n = namespace(a={first}) %}}{{% for i in range(99) %}}{{% set n.a = {statement} %}}{{% endfor %}}"


BOMBS = {
    "multiplied text": "{{ 'x' * 10**9 }}",
    "multiplied list": "{{ [1] * 10**9 }}",
    "a list that doubles": repeated("n.a + n.a", "[1]"),
    "a text that doubles": repeated("n.a + n.a", "'x'"),
    "joined with ~": repeated("n.a ~ n.a", "'x'"),
    "power": "{{ 10 ** 99999999 }}",
    "a number that is squared": repeated("n.a * n.a", "9"),
    "width": "{{ '%999999999d' % 1 }}",
    "width of format": "{{ '{:999999999}'.format(1) }}",
    "computed width": "{{ '%*d' % (999999999, 1) }}",
    "computed width of format": "{{ '{:{}}'.format(1, 999999999) }}",
    "filter format": "{{ '%999999999d' | format(1) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "filter center": "{{ 'x' | center(999999999) }}",
    "indent": "{{ 'x' | indent(999999999, true) }}",
    "replace": "{{ ('x' * 100000).replace('x', 'x' * 100000) }}",
    "filter replace": "{{ ('x' * 100000) | replace('x', 'x' * 100000) }}",
    "join": "{{ ('x' * 100000).join(['x'] * 90000) }}",
    "expandtabs": "{{ '\t'.expandtabs(999999999) }}",
    "translate": "{{ ('x' * 100000).translate({120: 'x' * 100000}) }}",
    "macro": "{% macro f() %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endmacro %}{% set a = f() %}",
    "set block": "{% set a %}{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}{% endset %}",
    "separators": "{{ [1, 2, 3] | tojson(separators=('x' * 1000000, ':')) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_of_hostile_templates_is_bounded(name):
    _, description = refused(BOMBS[name], chat())
    assert description.endswith("characters when rendered, the limit")


ENDLESS = {
    "loops": "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "recursive loop": "{% for a in [r] recursive %}{{ loop(a) if a is not number }}{{ loop([r]) }}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_time_of_hostile_templates_is_bounded(name, monkeypatch):
    monkeypatch.setattr("router.text.bounds.RENDER_SECONDS", 0.1)
    _, description = refused("{% set r = range(99999) %}" + ENDLESS[name], chat())
    assert description == "takes more than 0.1 s of CPU time to render" or name == "recursive loop"


SOURCES = {
    "brackets": "{% if " + "(" * 5000 + "1" + ")" * 5000 + " %}{% endif %}",
    "blocks": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "long": "x" * (2 << 20),
}


@pytest.mark.parametrize("name", SOURCES)
def test_hostile_sources_are_errors_of_the_checkpoint(name):
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(SOURCES[name], {})


def test_ordinary_templates_are_not_slower_by_their_bounds():
    """A list of 100,000 numbers, and a text near the limit."""
    text = ChatTemplate("{{ ([1] * 1000) | length }}{{ messages[0].content * 2 }}{{ 7 % 4 }}", {}, max_characters=LIMIT)
    assert len(text.render(chat("x" * (LIMIT // 2 - 10)))) == LIMIT - 20 + 5
    assert MAX_ITEMS >= 100_000
