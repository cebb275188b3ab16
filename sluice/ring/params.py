"""A request's parameters, on the wire and in the services. The router has validated them."""

from enum import Enum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sluice.ring.errors import FinishReason
from sluice.ring.message import (
    MAX_DRAFT_LOGITS_BYTES,
    MAX_STOP_CHARS,
    MAX_WORDS_TOKENS,
    Amount,
    Count,
    Finite,
    GuideText,
    Logprobs,
    Name,
    NgramSize,
    Number,
    Part,
    Positive,
    Retention,
    Seconds,
    Sequences,
    Threshold,
    TokenId,
    Word,
)

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy."""


class BeamSearchParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """See sluice.v1.BeamSearch."""

    width: Sequences
    length_penalty: Finite = 1.0
    early_stopping: bool = False
    exhaustive: bool = False
    diversity_rate: Finite = 0.0


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Applied in this order: logits processors, logit bias, bans (token ids, words, n-grams), penalties, the guide,
    temperature, top-k, top-p, min-p (as in transformers)."""

    temperature: Amount = 1.0
    top_k: Count = 0
    """0 is off."""
    top_p: Part = 1.0
    min_p: Part = 0.0
    repetition_penalty: Positive = 1.0
    """Over prompt and output (CTRL, arXiv:1909.05858)."""
    presence_penalty: Finite = 0.0
    """Over the output."""
    frequency_penalty: Finite = 0.0
    """Over the output."""
    seed: Number = 0
    """Unsigned 64 bits; drawn by the router if the client gave none."""
    logit_bias: tuple[tuple[TokenId, Finite], ...] = ()
    bad_token_ids: tuple[TokenId, ...] = ()
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Empty: all."""
    bad_words: tuple[Word, ...] = ()
    """Words of several tokens, none of which is completed; those of a single one are in `bad_token_ids`."""
    logits_processors: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Names of the engine's functions that change the logits first, in this order."""
    no_repeat_ngram_size: NgramSize = 0
    """No sequence of so many tokens comes twice in prompt and output; 0 is off."""
    beam_search: BeamSearchParams | None = None
    """None: sample."""
    logprobs: Logprobs | None = None
    """Number of top alternatives to report with each chosen token. 0: the chosen one only; None: no logprobs."""

    def __post_init__(self) -> None:
        if sum(map(len, self.bad_words)) > MAX_WORDS_TOKENS:
            raise ValueError(f"bad words of more than {MAX_WORDS_TOKENS} tokens")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class StopParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """When the engine ends a sequence. For stop strings, which the detokenizer finds, see `TextParams`."""

    max_tokens: Count
    """New tokens, at least 1; prompt + max_tokens fits the context."""
    min_tokens: Count = 0
    eos_token_ids: tuple[TokenId, ...] = ()
    """The model's own; empty with ignore_eos."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """The caller's."""

    def finish_reason(self, token: int, count: int) -> FinishReason:
        """Why `token`, number `count` of the output, ends the sequence; RUNNING if it does not."""
        # The stop token itself is output and counts; whether to show it is up to the detokenizer.
        if count > self.min_tokens:
            if token in self.eos_token_ids:
                return FinishReason.EOS
            if token in self.stop_token_ids:
                return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if count >= self.max_tokens else FinishReason.RUNNING


class TextParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the detokenizer turns a stream's tokens into text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: Count = 0
    """A stop string that an earlier token than this (1-based) completes does not count."""
    skip_special_tokens: bool = True
    interval: Count = 1
    """Minimum tokens per row, except for the last one; 0: a single row at the end."""

    def __post_init__(self) -> None:
        if sum(map(len, self.stop)) > MAX_STOP_CHARS:
            raise ValueError(f"stop strings of more than {MAX_STOP_CHARS} characters")


class DraftLogits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Of the distributions that draft tokens were drawn from."""

    dtype: Literal["float32", "bfloat16", "float16"]
    data: Annotated[bytes, Meta(max_length=MAX_DRAFT_LOGITS_BYTES)]
    """[draft tokens, vocabulary], row-major, little-endian."""


class Speculation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Guesses of the next tokens, which are checked several at a time. Without `draft_logits` they change no token."""

    max_draft_tokens: Count | None = None
    """Per sequence and step; 0: none; None: as the engine is configured."""
    draft_token_ids: tuple[TokenId, ...] = ()
    """What the caller expects as the output, from its start."""
    draft_logits: DraftLogits | None = None
    """Of each of these tokens: while the output equals them, they are accepted by rejection sampling."""
    acceptance_threshold: Threshold | None = None
    """A draft token is accepted if it is at least so many times as likely as the draft had it; None: a random number.
    Only with `draft_logits`."""

    def __post_init__(self) -> None:
        if self.acceptance_threshold is not None and self.draft_logits is None:
            raise ValueError("acceptance_threshold without draft_logits")


class GuideKind(Enum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


class Guide(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the whole output has to match."""

    kind: GuideKind
    text: GuideText = ""
    """The schema, expression, grammar or document; of CHOICE a JSON array of strings; of JSON_OBJECT empty."""


DEFAULT_RETENTION = 35
"""Priority of a block that no range names, as in TensorRT-LLM."""


class RangeRetention(msgspec.Struct, frozen=True, array_like=True):
    """Eviction priority of the blocks of prompt tokens start to end - 1."""

    start: Count
    end: Count
    priority: Retention
    """0, evicted first, to 100, evicted last."""
    seconds: Seconds | None = None
    """Counted from when the request releases the block; then DEFAULT_RETENTION applies. None: until evicted."""


class RetentionParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Eviction priority of a request's blocks after it has released them. Orders eviction, never prevents it."""

    prompt: tuple[RangeRetention, ...] = ()
    """Ranges that do not overlap, in order."""
    decode_priority: Retention = DEFAULT_RETENTION
    decode_seconds: Seconds | None = None


def derive_seed(seed: int, sequence: int) -> int:
    """Seed of one of n sequences: sequence 0 keeps the request's own, so that n = 1 and a single request agree.

    The others step by the 64-bit golden ratio (SplitMix64, Steele et al. 2014): neighbouring seeds stay apart.
    """
    return (seed + sequence * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


def place_in_line(priority: int, arrived_at: float, aging_seconds: float) -> float:
    """Sort key of waiting requests, lowest first. A request gains one priority class per `aging_seconds`; 0: never.

    Since all waiting requests gain alike, the order of two of them is fixed on arrival: a request one class higher
    overtakes those that arrived up to `aging_seconds` earlier.
    """
    return arrived_at - priority * aging_seconds if aging_seconds else -priority
