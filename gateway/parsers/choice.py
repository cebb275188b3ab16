"""Chooses the parsers for the output of a model."""

from collections.abc import Callable

from gateway.parsers import hermes, reasoning
from gateway.parsers.hermes import CallsOrAnswer, HermesParser
from gateway.parsers.parts import Parser, PlainText
from gateway.parsers.reasoning import ReasoningParser, begun_by_prompt, begun_by_text
from sluice.settings.gateway import Parsers

NewParser = Callable[[str], Parser]
"""Creates the parser of an output, from the end of its prompt if `reasons`."""


def parser_for(
    settings: Parsers, tools: bool, guided: bool, continued: str = "", *, by_grammar: bool = False
) -> NewParser:
    """`tools`: the prompt offers tools; `guided`: a guide covers the whole output; `continued`: the beginning of the
    answer that the output continues, if the client sent it; `by_grammar`: the guide is `hermes.grammar`."""
    calls: Callable[[], Parser] = CallsOrAnswer if by_grammar else HermesParser
    inner: Callable[[], Parser] = calls if tools and settings.tool_parser == "hermes" else PlainText
    if not reasons(settings, guided):
        return lambda _: inner()

    def new(prompt_tail: str) -> Parser:
        unmarked = settings.reasoning_parser == "deepseek_r1"
        begun = begun_by_text(continued) if continued.strip() else begun_by_prompt(prompt_tail, unmarked)
        return ReasoningParser(begun, inner())

    return new


def tags_of(settings: Parsers, tools: bool, guided: bool) -> list[str]:
    """The tags that these parsers look for. In some models they are special tokens, which the ring omits unless asked
    for them."""
    tags = [hermes.BEGIN, hermes.END] if tools and settings.tool_parser == "hermes" else []
    return tags + ([reasoning.BEGIN, reasoning.END] if reasons(settings, guided) else [])


def reasons(settings: Parsers, guided: bool) -> bool:
    """Whether the output may begin with reasoning."""
    # A guide leaves no room for reasoning.
    return settings.reasoning_parser is not None and not guided
