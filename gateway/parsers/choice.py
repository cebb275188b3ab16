"""Chooses the parsers for the output of a model."""

from collections.abc import Callable

from gateway.parsers.hermes import HermesParser
from gateway.parsers.parts import Parser, PlainText
from gateway.parsers.reasoning import ReasoningParser
from sluice.settings.gateway import Parsers

NewParser = Callable[[], Parser]


def parser_for(settings: Parsers, tools: bool, guided: bool) -> NewParser:
    """A factory of parsers, one per output. `tools`: the prompt offers tools; `guided`: a guide covers the whole
    output."""
    inner: NewParser = HermesParser if tools and settings.tool_parser == "hermes" else PlainText
    reasoning = settings.reasoning_parser
    # A guide leaves no room for reasoning.
    if reasoning is None or guided:
        return inner
    return lambda: ReasoningParser(reasoning == "deepseek_r1", inner())
