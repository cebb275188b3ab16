"""The scripted model: pure functions that stand in for a language model, and the outputs that follow from them.

A *digest* summarizes a sequence of tokens in 64 bits. The next token, its log-probabilities and all tensors are
functions of the digest of the tokens so far, so that one wrong token in the context changes everything that follows.
"""

from collections.abc import Collection, Iterable, Sequence
from struct import pack

from engine_worker.step import LOGITS
from sluice.wire.params import DraftLogits, SamplingParams, Speculation, StopParams, derive_seed
from sluice.wire.rows import TokenLogprob
from sluice.wire.tables import VirtualTokens
from tests.fakes.adapters import initial_digest

MASK = (1 << 64) - 1
VOCAB = 97
HIDDEN_SIZE = 2

TENSORS = {LOGITS: 8, "hidden_states": 8}
"""Bytes per row of each tensor."""


def mix(state: int, value: int) -> int:
    """The digest after one more token; also used as a hash function for noise."""
    state = ((state ^ value) * 6364136223846793005 + 1442695040888963407) & MASK
    return state ^ (state >> 29)


def digest(tokens: Iterable[int], state: int = 0) -> int:
    for token in tokens:
        state = mix(state, token)
    return state


def choose(state: int, seed: int, position: int, banned: Collection[int] = ()) -> int:
    """Sample the token that follows tokens with digest `state`."""
    noise = mix(mix(state, seed), position)
    while noise % VOCAB in banned:
        noise = mix(noise, 1)
    return noise % VOCAB


def draft_logits(count: int) -> DraftLogits:
    """Logits of `count` draft tokens. All values of row i are i, so that rows can be told apart."""
    return DraftLogits("float32", b"".join(pack("<f", row) * VOCAB for row in range(count)))


def accepts(state: int, seed: int, token: int, row: int, threshold: float | None, banned: Collection[int] = ()) -> bool:
    """Whether draft token `token`, with row `row` of the draft logits, is accepted after tokens with digest `state`."""
    noise = mix(mix(mix(state, seed), token), row)
    return token not in banned and noise % 8 < (4 if threshold is None else 8 - 6 * threshold)


def candidates(state: int, banned: Collection[int] = ()) -> list[tuple[int, float]]:
    """All tokens that may follow tokens with digest `state`, with their log-probabilities, the most likely first."""
    scores = {token: -(mix(state, token) % 100_003) / 10_000 for token in range(VOCAB) if token not in banned}
    return sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))


def continuation(
    prompt: Iterable[int],
    stopping: StopParams,
    seed: int = 0,
    sequence: int = 0,
    speculation: Speculation = Speculation(),  # noqa: B008 - frozen
    version: str | None = None,
) -> list[int]:
    """The complete output of an undisturbed sequence. `version`: that of its LoRA adapter."""
    state, output, seed = digest(prompt, initial_digest(version)), [], derive_seed(seed, sequence)
    ends = stopping.eos_token_ids + stopping.stop_token_ids
    drafts = speculation.draft_token_ids if speculation.draft_logits is not None else ()
    while len(output) < stopping.max_tokens:
        position = len(output)
        banned = ends if position < stopping.min_tokens else ()
        has_draft = position < len(drafts) and drafts[:position] == tuple(output)
        if has_draft and accepts(state, seed, drafts[position], position, speculation.acceptance_threshold, banned):
            output.append(drafts[position])
        else:
            output.append(choose(state, seed, position, banned))
        state = mix(state, output[-1])
        if output[-1] in ends and len(output) > stopping.min_tokens:
            break
    return output


def shown_to_model(tokens: Iterable[int], virtual: VirtualTokens | None) -> list[int]:
    """The tokens with each virtual token replaced by a number >= VOCAB that identifies its table row."""
    if virtual is None:
        return list(tokens)
    size = 2 * HIDDEN_SIZE
    rows = [
        VOCAB + int.from_bytes(table.data[row * size : (row + 1) * size], "little")
        for table, _ in virtual.placed
        for row in range(table.rows)
    ]
    return [token if token < VOCAB else rows[token - VOCAB] for token in tokens]


def prompt_row(
    prompt: Sequence[int], row: int, top: int, version: str | None = None
) -> tuple[float, int, list[tuple[int, float]]]:
    """Log-probability, rank and `top` alternatives of prompt token row + 1."""
    return scored_row(digest(prompt[: row + 1], initial_digest(version)), prompt[row + 1], top)


def scored_row(state: int, token: int, top: int) -> tuple[float, int, list[tuple[int, float]]]:
    """Log-probability, rank and `top` alternatives of `token` after tokens with digest `state`."""
    noise = mix(state, token)
    return -float(noise % 64), 1 + noise % VOCAB, [((noise + i) % VOCAB, -float(i)) for i in range(top)]


def logprob_of(token: int, sampling: SamplingParams) -> TokenLogprob | None:
    return None if sampling.logprobs is None else TokenLogprob(-token / VOCAB, 1, [])


def tensor_row(name: str, states: Iterable[int], weights: int = 0) -> bytes:
    """Consecutive rows of a tensor, one for each digest. `weights` tells two models apart."""
    return b"".join(pack("<q", mix(state + weights & MASK, len(name)) >> 1) for state in states)
