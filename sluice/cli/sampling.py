"""Options that the commands that generate text share: sampling, where an output ends, and adapters."""

from typing import Annotated

import typer

from sluice.cli.common import with_options
from sluice.client import Options


def _sampling(
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Maximum number of new tokens. Default: as many as fit into the context."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Sampling temperature. 0: greedy decoding. Default: the server's."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Sample from the K most likely tokens. 0: from all tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample from the most likely tokens whose probabilities add up to P."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Sample from tokens at least P times as probable as the most likely one."),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Make tokens of the prompt and the output less likely. 1: off."),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Subtract this from the logits of tokens that occur in the output."),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="Subtract this from the logit of a token for each time that it occurred."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Seed for sampling. The same seed gives the same output. Default: random."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End the output before this text. Repeatable.")
    ] = None,
    lora: Annotated[str | None, typer.Option(metavar="ID", help="LoRA adapter to use, see `sluice lora`.")] = None,
    prompt_adapter: Annotated[
        str | None, typer.Option(metavar="ID", help="Prompt adapter to use, see `sluice prompt-adapter`.")
    ] = None,
) -> Options:
    options = Options(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    options |= Options(repetition_penalty=repetition_penalty, presence_penalty=presence_penalty)
    options |= Options(frequency_penalty=frequency_penalty, seed=seed, stop=stop)
    return options | Options(lora_id=lora, prompt_adapter_id=prompt_adapter)


with_sampling = with_options(_sampling, "options")
"""Adds these options to a command and passes `Options` as the parameter `options`."""
