"""Which parsers an answer goes through."""

from collections.abc import Callable

from gateway.parsers.hermes import HermesParser
from gateway.parsers.parts import Parser, PlainText
from gateway.parsers.reasoning import ReasoningParser
from sluice.settings.gateway import Parsers

NewParser = Callable[[], Parser]


def parser_for(settings: Parsers, tools: bool, guided: bool) -> NewParser:
    """For each output a new one. `tools`: there are some in the prompt; `guided`: its whole output follows a guide."""
    inner: NewParser = HermesParser if tools and settings.tool_parser == "hermes" else PlainText
    reasoning = settings.reasoning_parser
    # A guide leaves no room for reasoning.
    if reasoning is None or guided:
        return inner
    return lambda: ReasoningParser(reasoning == "deepseek_r1", inner())
