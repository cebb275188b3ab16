"""Chooses the parsers for the output of a model."""

from collections.abc import Callable

from gateway.parsers import hermes, reasoning
from gateway.parsers.hermes import HermesParser
from gateway.parsers.parts import Parser, PlainText
from gateway.parsers.reasoning import ReasoningParser
from sluice.settings.gateway import Parsers

NewParser = Callable[[], Parser]


def parser_for(settings: Parsers, tools: bool, guided: bool) -> NewParser:
    """A factory of parsers, one per output. `tools`: the prompt offers tools; `guided`: a guide covers the whole
    output."""
    inner: NewParser = HermesParser if tools and settings.tool_parser == "hermes" else PlainText
    if not _reasons(settings, guided):
        return inner
    return lambda: ReasoningParser(settings.reasoning_parser == "deepseek_r1", inner())


def tags_of(settings: Parsers, tools: bool, guided: bool) -> list[str]:
    """The tags that these parsers look for. In some models they are special tokens, which the ring omits unless asked
    for them."""
    tags = [hermes.BEGIN, hermes.END] if tools and settings.tool_parser == "hermes" else []
    return tags + ([reasoning.BEGIN, reasoning.END] if _reasons(settings, guided) else [])


def _reasons(settings: Parsers, guided: bool) -> bool:
    # A guide leaves no room for reasoning.
    return settings.reasoning_parser is not None and not guided
