"""The command line's names of API fields, for the errors of servers, which name fields."""

import re
from collections.abc import Mapping

OPTIONS = {
    "spec.text": "PROMPT",
    "spec.n": "--n",
    "spec.lora_id": "--lora",
    "spec.prompt_adapter_id": "--prompt-adapter",
    "spec.stopping.max_tokens": "--max-tokens",
    "spec.stopping.stop": "--stop",
    "spec.sampling.temperature": "--temperature",
    "spec.sampling.top_k": "--top-k",
    "spec.sampling.top_p": "--top-p",
    "spec.sampling.min_p": "--min-p",
    "spec.sampling.repetition_penalty": "--repetition-penalty",
    "spec.sampling.presence_penalty": "--presence-penalty",
    "spec.sampling.frequency_penalty": "--frequency-penalty",
    "spec.sampling.seed": "--seed",
    "spec.sampling.beam_search": "--beams",
    "spec.sampling.beam_search.width": "--beams",
    "spec.speculation.max_draft_tokens": "--max-draft-tokens",
    "spec.output.echo": "--echo",
    "spec.output.logprobs": "--logprobs",
    "spec.output.prompt_logprobs": "--prompt-logprobs",
    "spec.guided.json_schema": "--json-schema",
    "spec.guided.json_object": "--json",
    "spec.guided.regex": "--regex",
    "spec.guided.ebnf": "--grammar",
    "spec.guided.choice": "--choice",
    "spec.guided.choice.choices": "--choice",
}
"""The options of `sluice generate` by the field that they set. Other commands have some of them, by the same names."""
FIELD = re.compile(r"\bspec(?:\.[a-z_]+)+")


def with_option_names(message: str, names: Mapping[str, str] = OPTIONS) -> str:
    """The message with options in place of the fields that they set."""
    return FIELD.sub(lambda field: names.get(field[0], field[0]), message)
