"""Guides that need too much time or memory: each ends within its budget, with an error, and affects no other guide."""

import json
from pathlib import Path

import pytest

from engine_worker.guided.masks import MaskRequest
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.tools import allowed, followed, make, masked, prepared, regex

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

COMPILE_SECONDS, STEPS = 0.6, 60
PATIENCE = 200.0
"""Seconds to wait: the budgets are CPU time, and on a busy machine trials have a small share of it."""


def schema(value) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


def ebnf(text: str) -> Guide:
    return Guide(GuideKind.EBNF, text)


def all_of(patterns: list[str]) -> Guide:
    return schema({"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]})


COMPILING, FOLLOWING = "compiling it", "finding its next tokens"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
HOSTILE = {
    "30 patterns": (all_of([f"^.*{LETTERS[i % 26]}.{{{i}}}$" for i in range(30)]), None),
    "30 lengths": (all_of([f"^(.{{{i + 2}}})*$" for i in range(30)]), None),
    "rules that call rules": (
        ebnf("\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(60_000)), 'r60000: "a"'])),
        COMPILING,
    ),
    "many rules": (
        ebnf("\n".join(["root ::= r0", *(f'r{i} ::= "x{i}" r{i * 7 % 20_000} | "y"' for i in range(20_000))])),
        COMPILING,
    ),
    "many properties": (
        schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(8000)}}),
        COMPILING,
    ),
    "many structures": (
        Guide(
            GuideKind.STRUCTURAL_TAG,
            json.dumps(
                {
                    "structures": [
                        {"begin": f"<f{i}>", "schema": {"type": "object"}, "end": "</f>"} for i in range(4000)
                    ],
                    "triggers": ["<f"],
                }
            ),
        ),
        COMPILING,
    ),
    "long choices": (Guide(GuideKind.CHOICE, json.dumps(["x" * i for i in range(1400)])), None),
    "parentheses": (ebnf("start: " + "(" * 20_000 + '"a"' + ")" * 20_000), None),
    "parentheses in GBNF": (ebnf("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000), None),
    "nested schemas": (Guide(GuideKind.JSON_SCHEMA, '{"type":"array","items":' * 40_000 + "{}" + "}" * 40_000), None),
    "repeated repetitions": (regex("((a{1,500}){1,500}){1,500}"), FOLLOWING),
    "rules that repeat": (ebnf('start: a{1,1000}\na: b{1,1000}\nb: c{1,1000}\nc: "x"{1,1000}'), FOLLOWING),
    "ambiguous": (ebnf('root ::= root root | "a" | "" | root root root'), None),
    "many states": (regex("(a|b)*a(a|b){30}c"), None),
    "branches of branches": (
        schema({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(6)]} for i in range(12)]}),
        None,
    ),
}
"""Guides, each with the phase that exceeds its budget; None: the guide may also be invalid or harmless."""


@pytest.fixture(scope="module")
def strict():
    guides = make(guided_compile_seconds=COMPILE_SECONDS, guided_mask_seconds=0.02, guided_memory=400 << 20)
    yield guides
    guides.close()


def follow(guides, guide: Guide, neighbour) -> Fault | None:
    """Follow a guide for some steps alongside a neighbour, whose masks must not change; returns the guide's fault."""
    (sequence,) = followed(guides, guide, ends=())
    output: list[int] = []
    expected = allowed(masked(guides, MaskRequest(neighbour, [], 0, (), True))[0])
    for _ in range(STEPS):
        first, second = masked(
            guides, MaskRequest(neighbour, [], 0, (), True), MaskRequest(sequence, output, len(output), (), True)
        )
        assert allowed(first) == expected
        if second.fault is not None or second.complete:
            return second.fault
        output.append(min(allowed(second)))
    return None


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_guide_ends_within_its_budget(strict, name):
    guide, work = HOSTILE[name]
    (neighbour,) = followed(strict, regex("[0-9]{3}"))
    fault = prepared(strict, guide, PATIENCE) or follow(strict, guide, neighbour)
    if work is not None or (fault is not None and fault.error_code is not ErrorCode.INVALID_ARGUMENT):
        assert fault.error_code is ErrorCode.GUIDE_TOO_COMPLEX
        assert fault.field == f"spec.guided.{guide.kind.value}"
        assert fault.message.startswith("is too complex: ")
    if work is COMPILING:
        assert work in fault.message
        # Remembered, and not tried again.
        second = strict.prepare(guide)
        assert (second.done, second.fault) == (True, fault)


def test_memory_is_bounded_and_released():
    guides = make(guided_memory=40 << 20, guided_compile_seconds=30.0)
    try:
        guide, _ = HOSTILE["many properties"]
        fault = prepared(guides, guide, PATIENCE)
        assert fault.error_code is ErrorCode.GUIDE_TOO_COMPLEX
        assert "40 MiB of memory (guided_memory)" in fault.message
        template = guides._processes.template().pid
        assert Path(f"/proc/{template}/task/{template}/children").read_text() == ""
        (neighbour,) = followed(guides, regex("[0-9]{3}"))
        assert len(allowed(masked(guides, MaskRequest(neighbour, [], 0, (), True))[0])) == 10
    finally:
        guides.close()
