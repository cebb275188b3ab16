"""What a request asks for: one definition, on the wire and in the services.

Past the router every field is present and in range.
"""

import msgspec

from sluice.ring.message import (
    MAX_STOP_CHARS,
    Amount,
    Count,
    Finite,
    Logprobs,
    Number,
    Part,
    Positive,
    Retention,
    Seconds,
    TokenId,
)

GREEDY_TEMPERATURE = 1e-5
"""A temperature below this is greedy."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen.

    Applied in this order: logit bias, bans, penalties, temperature, top-k, top-p, min-p (as in transformers).
    """

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
    """Unsigned 64 bits; the router draws one when the client gave none."""
    logit_bias: tuple[tuple[TokenId, Finite], ...] = ()
    bad_token_ids: tuple[TokenId, ...] = ()
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Empty: all."""
    logprobs: Logprobs | None = None
    """Best alternatives to report with each chosen token; None reports nothing, 0 only the chosen one."""

    @property
    def greedy(self) -> bool:
        """The most likely token is taken; no noise."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalized(self) -> bool:
        """Some penalty looks at the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class StopParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """When the engine stops a sequence. Stop strings are the detokenizer's: see `TextParams`."""

    max_tokens: Count
    """New tokens, at least 1; prompt + max_tokens fits the context."""
    min_tokens: Count = 0
    eos_token_ids: tuple[TokenId, ...] = ()
    """The model's own; empty with ignore_eos."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """The caller's."""


class TextParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the detokenizer turns a stream's tokens into text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: Count = 0
    """A stop string completed by an earlier token than this (1-based) does not count."""
    skip_special_tokens: bool = True
    interval: Count = 1
    """Tokens per row at least, but for a sequence's last row; 0: one row at the end."""

    def __post_init__(self) -> None:
        if sum(map(len, self.stop)) > MAX_STOP_CHARS:
            raise ValueError(f"stop strings of more than {MAX_STOP_CHARS} characters")


DEFAULT_RETENTION = 35
"""Priority of a block that no range names, as in TensorRT-LLM."""


class RangeRetention(msgspec.Struct, frozen=True, array_like=True):
    """How eagerly the blocks of prompt tokens start to end - 1 are kept."""

    start: Count
    end: Count
    priority: Retention
    """0, evicted first, to 100, evicted last."""
    seconds: Seconds | None = None
    """From when the request lets go of the block; then DEFAULT_RETENTION. None: until evicted."""


class RetentionParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How eagerly a request's blocks are kept when nobody holds them any more. Orders eviction, never prevents it."""

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
    """The least goes first. A request that waits gains one priority class every `aging_seconds`; never where that is 0.

    Since all who wait gain alike, who is before whom is settled when they arrive: a request of a class above overtakes
    those that came up to `aging_seconds` earlier.
    """
    return arrived_at - priority * aging_seconds if aging_seconds else -priority
