"""Parts of the requests of the engine's state machine: virtual tokens, draft tokens, a state to resume from."""

from random import Random

from msgspec.structs import replace

from sluice.wire.params import Speculation
from sluice.wire.requests import Submit
from sluice.wire.tensors import NO_TENSORS
from tests.engine_worker.core.machine_oracle import Oracle
from tests.fakes.scripted_tokens import VOCAB, draft_logits
from tests.fakes.submits import extras_of, with_extras


def with_virtual_tokens(prompt: list[int], rows: int, middle: int) -> list[int]:
    """The prompt with virtual tokens for all `rows` table rows in front, one more at `middle`, and one at the end."""
    return [*range(VOCAB, VOCAB + rows), *prompt[:middle], VOCAB, *prompt[middle:], VOCAB + 1]


def speculation_for(
    oracle: Oracle, spec: Submit, drafts: int, wrong_every: int, with_logits: bool, threshold: float | None
) -> Speculation:
    """Draft tokens that are the first sequence's output, except that every `wrong_every`-th is wrong, if not 0."""
    tokens = [*oracle.output(spec, 0)]
    if wrong_every:
        wrong = slice(wrong_every - 1, None, wrong_every)
        tokens[wrong] = [(token + 1) % VOCAB for token in tokens[wrong]]
    if not with_logits:
        return Speculation(drafts, tuple(tokens))
    return Speculation(drafts, tuple(tokens), draft_logits(len(tokens)), threshold)


def resuming(oracle: Oracle, spec: Submit, choices: Random) -> Submit:
    """Some sequences with any part of their output, some that have ended, at least one that has not."""
    ended = choices.sample(range(spec.n), choices.choice([0, 0, choices.randrange(spec.n)]))
    resume = {}
    for sequence in range(spec.n):
        if choices.random() < 0.7:
            output = oracle.output(spec, sequence)
            resume[sequence] = output[: choices.randrange(len(output) + 1)]
    tensors = extras_of(spec).tensors or NO_TENSORS
    if tensors.output:
        rows = {sequence: choices.randrange(len(output) + 1) for sequence, output in resume.items()}
        tensors = replace(tensors, output_rows=rows)
    if tensors.context:
        tensors = replace(tensors, context_rows=choices.randrange(len(spec.prompt) + 1))
    return with_extras(replace(spec, resume=resume, ended=ended), tensors=tensors)
