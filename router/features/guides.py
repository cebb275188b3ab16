"""Guided decoding: checks a guide as far as possible without compiling it. The engine compiles it."""

import json
from dataclasses import dataclass
from typing import Any

from router.errors import Reason, Violations, shown
from router.parse.model import Limits
from router.requests.part import Part
from router.requests.token_log import RequestLog
from sluice.v1 import generation_pb2 as pb
from sluice.v1.sampling_pb2 import GuidedDecoding
from sluice.wire.params import Guide, GuideKind

FIELD = "spec.guided"
JSON_KINDS = frozenset({GuideKind.JSON_SCHEMA, GuideKind.STRUCTURAL_TAG})
"""Guides that are JSON objects."""


@dataclass(frozen=True)
class Guides:
    fields = frozenset({"guided"})

    _limits: Limits

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "_Guided | None":
        guide = _parse(message.guided, self._limits, bad, tuple(message.output.keep_special_tokens))
        return None if guide is None else _Guided(guide)


@dataclass(frozen=True, slots=True)
class _Guided(Part):
    guide: Guide

    def submitted(self, _: RequestLog) -> dict[str, Any]:
        return {"guide": self.guide}


def _parse(message: GuidedDecoding, limits: Limits, bad: Violations, shown_tokens: tuple[str, ...]) -> Guide | None:
    """`shown_tokens`: output.keep_special_tokens."""
    name = message.WhichOneof("guide")
    if name is None:
        return None
    kind = GuideKind(name)
    if kind is GuideKind.JSON_OBJECT:
        return Guide(kind)
    if kind is GuideKind.CHOICE:
        return _choice(list(message.choice.choices), limits, bad)
    field, text = f"{FIELD}.{name}", getattr(message, name)
    if not text:
        bad.add(field, "is empty", reason=Reason.MISSING)
    elif bad.at_most(field, len(text.encode()), limits.guide_bytes, "bytes") and kind in JSON_KINDS:
        _check_json(field, text, bad)
    return Guide(kind, text, shown_tokens if kind is GuideKind.EBNF else ())


def _choice(choices: list[str], limits: Limits, bad: Violations) -> Guide:
    field = f"{FIELD}.choice.choices"
    if not choices:
        bad.add(field, "is empty, must have at least one choice", reason=Reason.MISSING)
    bad.at_most(field, sum(len(choice.encode()) for choice in choices), limits.guide_bytes, "bytes")
    for i, choice in enumerate(choices):
        if not choice:
            bad.add(f"{field}[{i}]", "is empty", reason=Reason.MISSING)
    return Guide(GuideKind.CHOICE, json.dumps(choices, ensure_ascii=False))


def _check_json(field: str, text: str, bad: Violations) -> None:
    try:
        value = json.loads(text)
    except RecursionError:
        bad.add(field, "is nested too deeply", reason=Reason.TOO_MANY)
        return
    except ValueError as error:
        bad.add(field, f"is not valid JSON: {shown(str(error))}", private=True, reason=Reason.INVALID_FORMAT)
        return
    if not isinstance(value, dict):
        bad.add(field, "must be a JSON object", reason=Reason.INVALID_FORMAT)
