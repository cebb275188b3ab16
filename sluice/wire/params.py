"""The parameters of a request, on the wire and in the services. The router has validated them."""

import math
from enum import Enum
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from sluice.wire.errors import FinishReason
from sluice.wire.message import Count, Finite, Logprobs, Name, Number, Retention, Seconds, Sequences, TokenId

MAX_WORD_TOKENS = 1024
"""Maximum number of tokens in a bad word."""
MAX_WORDS_TOKENS = 4096
"""Maximum number of tokens in all bad words of a request. Each costs the engine's step loop a few microseconds."""
MAX_DRAFT_LOGITS_BYTES = 8 << 20
"""A quarter of the maximum frame, and half of the message that a router accepts from a client by default."""
MAX_STOP_CHARS = 1 << 20
"""Maximum number of characters in all stop strings of a request. Each needs about a hundred bytes of memory."""
Part = Annotated[float, Meta(ge=0, le=1)]
GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""


class Range(NamedTuple):
    """The range of a sampling parameter, in requests and in defaults. `above`: `low` itself is outside the range."""

    low: float
    high: float
    above: bool = False

    def problem(self, value: float) -> str | None:
        """Why the value is out of range; None if it is in range. NaN and infinities are always out of range."""
        if math.isfinite(value) and value <= self.high and (value > self.low if self.above else value >= self.low):
            return None
        number = value if isinstance(value, int) else f"{value:g}"
        return f"is {number}, must be in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"


SAMPLING_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 100, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
}
TOP_K = "top_k"
DEFAULT_NAMES = (*SAMPLING_RANGES, TOP_K)
"""The parameters that have a default of the model or of the server."""


def default_problem(name: str, value: object) -> str | None:
    """What is wrong with the default of a parameter in DEFAULT_NAMES; None if it can be used."""
    if name == TOP_K:
        is_count = not isinstance(value, bool) and isinstance(value, int | float) and value >= 0 and value % 1 == 0
        return None if is_count else f"is {value!r}, must be an integer of at least 0"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is {value!r}, must be a number"
    return SAMPLING_RANGES[name].problem(value)


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

    temperature: Annotated[float, Meta(ge=0, le=1e15)] = 1.0
    top_k: Count = 0
    """0: off."""
    top_p: Part = 1.0
    min_p: Part = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e15)] = 1.0
    """Applied to tokens in prompt and output (CTRL, arXiv:1909.05858)."""
    presence_penalty: Finite = 0.0
    """Applied to tokens in the output."""
    frequency_penalty: Finite = 0.0
    """Applied to tokens in the output."""
    seed: Number = 0
    """Unsigned 64 bits. The router chooses one if the client did not set it."""
    logit_bias: tuple[tuple[TokenId, Finite], ...] = ()
    bad_token_ids: tuple[TokenId, ...] = ()
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Empty: all tokens are allowed."""
    bad_words: tuple[Annotated[tuple[TokenId, ...], Meta(min_length=2, max_length=MAX_WORD_TOKENS)], ...] = ()
    """Words of several tokens that the output must not contain. Words of one token are in `bad_token_ids`."""
    logits_processors: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Names of the engine's logits processors, in the order in which they are applied."""
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=16)] = 0
    """No sequence of this many tokens may occur twice in prompt and output. 0: off."""
    beam_search: BeamSearchParams | None = None
    """None: sampling."""
    logprobs: Logprobs | None = None
    """Number of top alternatives to report with each chosen token. 0: only the chosen token. None: no logprobs."""

    def __post_init__(self) -> None:
        if (tokens := sum(map(len, self.bad_words))) > MAX_WORDS_TOKENS:
            raise ValueError(f"bad_words may have at most {MAX_WORDS_TOKENS} tokens in total (got {tokens})")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_rules(self) -> bool:
        """Whether the tokens so far may change the next logits."""
        return bool(self.penalized or self.no_repeat_ngram_size or self.bad_words or self.logits_processors)


class StopParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """When the engine ends a sequence. For stop strings, which the detokenizer searches, see `TextParams`."""

    max_tokens: Count
    """Maximum number of new tokens, at least 1. Prompt and max_tokens together fit into the context."""
    min_tokens: Count = 0
    eos_token_ids: tuple[TokenId, ...] = ()
    """The model's EOS tokens. Empty with ignore_eos."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """The caller's stop tokens."""
    hands_over: bool = False
    """Whether max_tokens ends only this attempt, with HANDED_OVER in place of LENGTH: another engine continues."""

    def finish_reason(self, token: int, count: int) -> FinishReason:
        """Why `token`, number `count` of the output (from 1), ends the sequence. RUNNING if it does not."""
        # The stop token is part of the output and is counted. The detokenizer decides whether to show it.
        if count > self.min_tokens:
            if token in self.eos_token_ids:
                return FinishReason.EOS
            if token in self.stop_token_ids:
                return FinishReason.STOP_TOKEN
        if count < self.max_tokens:
            return FinishReason.RUNNING
        return FinishReason.HANDED_OVER if self.hands_over else FinishReason.LENGTH


class TextParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the detokenizer turns a stream's tokens into text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: Count = 0
    """A stop string is ignored if a token before this one (1-based) completes it."""
    skip_special_tokens: bool = True
    keep_special_tokens: tuple[str, ...] = ()
    """Special tokens that are shown even with `skip_special_tokens`."""
    interval: Count = 1
    """Minimum number of tokens per row, except for the last row. 0: a single row at the end."""

    def __post_init__(self) -> None:
        if (characters := sum(map(len, self.stop))) > MAX_STOP_CHARS:
            raise ValueError(f"stop strings may have at most {MAX_STOP_CHARS} characters in total (got {characters})")


class DraftLogits(msgspec.Struct, frozen=True, omit_defaults=True):
    """Logits of the distributions from which draft tokens were sampled."""

    dtype: Literal["float32", "bfloat16", "float16"]
    data: Annotated[bytes, Meta(max_length=MAX_DRAFT_LOGITS_BYTES)]
    """[draft tokens, vocabulary], row-major, little-endian."""


class Speculation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Speculative decoding: draft tokens, several of which are verified in one step.

    Without `draft_logits`, draft tokens do not change the output.
    """

    max_draft_tokens: Count | None = None
    """Draft tokens per sequence and step. 0: none. None: the engine's setting."""
    draft_token_ids: tuple[TokenId, ...] = ()
    """The output that the caller expects, from its start."""
    draft_logits: DraftLogits | None = None
    """Logits of each token in draft_token_ids. As long as the output equals these tokens, they are accepted by
    rejection sampling."""
    acceptance_threshold: Annotated[float, Meta(gt=0, le=1)] | None = None
    """A draft token is accepted if the ratio of its probability to that in the draft is at least this. None: a random
    threshold. Requires `draft_logits`."""

    def __post_init__(self) -> None:
        if self.acceptance_threshold is not None and self.draft_logits is None:
            raise ValueError("acceptance_threshold requires draft_logits")


class GuideKind(Enum):
    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


class Guide(msgspec.Struct, frozen=True, omit_defaults=True):
    """The guide that the whole output must match."""

    kind: GuideKind
    text: Annotated[str, Meta(max_length=1 << 20)] = ""
    """The schema, expression, grammar or document. Empty for JSON_OBJECT. For CHOICE, a JSON array of strings, in which
    one byte may take six, so the limit is larger than the public one."""
    shown_tokens: tuple[str, ...] = ()
    """Texts that the output shows even if they are special tokens of the model: a literal of a grammar that is one of
    them stands for the token."""


DEFAULT_RETENTION = 35
"""Priority of a block outside all ranges, as in TensorRT-LLM."""


class RangeRetention(msgspec.Struct, frozen=True, array_like=True):
    """Eviction priority of the blocks of prompt tokens start to end - 1."""

    start: Count
    end: Count
    priority: Retention
    """0, evicted first, to 100, evicted last."""
    seconds: Seconds | None = None
    """How long the priority applies after the request has released the block; then DEFAULT_RETENTION applies.
    None: until the block is evicted."""


class RetentionParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Eviction priority of a request's blocks after it has released them. Affects the order of eviction only."""

    prompt: tuple[RangeRetention, ...] = ()
    """Ranges in order, which do not overlap."""
    decode_priority: Retention = DEFAULT_RETENTION
    decode_seconds: Seconds | None = None


def derive_seed(seed: int, sequence: int) -> int:
    """Seed of one of n sequences. Sequence 0 has the request's seed, so that its output does not depend on n.

    The seeds of the others are multiples of the 64-bit golden ratio apart (SplitMix64, Steele et al. 2014), so that
    they do not coincide with those of requests with neighbouring seeds.
    """
    return (seed + sequence * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


def place_in_line(priority: int, arrived_at: float, aging_seconds: float) -> float:
    """Sort key of waiting requests, lowest first. A request moves up one priority class per `aging_seconds`; 0: never.

    All waiting requests move up at the same rate, so the order of two requests never changes: a request one class
    higher overtakes those that arrived up to `aging_seconds` earlier.
    """
    return arrived_at - priority * aging_seconds if aging_seconds else -priority
