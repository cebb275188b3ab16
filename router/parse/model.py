"""The served model and its defaults, read from the checkpoint; and the limits of one request."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from router.errors import RequestError, shown
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint
from sluice.checkpoint.vision import Vision
from sluice.settings.router import ClientLimits
from sluice.wire.errors import ErrorCode
from sluice.wire.params import DEFAULT_NAMES, MAX_DRAFT_LOGITS_BYTES, TOP_K, SamplingParams, default_problem

ADAPTER_SEPARATOR, TABLE_SEPARATOR = ".", "+"
"""They precede the versions of the adapter and of the prompt adapter in `Started.model_fingerprint`."""


class Began(NamedTuple):
    """The model and adapters with which the stream that a request resumes began. A field is empty if it was not used or
    is unknown."""

    model: str = ""
    """Fingerprint of the model."""
    adapter: str = ""
    """Version of the LoRA adapter."""
    table: str = ""
    """Version of the prompt adapter."""

    @classmethod
    def read(cls, fingerprint: str) -> "Began":
        """The fields, from the value of `Started.model_fingerprint`."""
        both, _, table = fingerprint.partition(TABLE_SEPARATOR)
        model, _, adapter = both.partition(ADAPTER_SEPARATOR)
        return cls(model, adapter, table)

    @property
    def fingerprint(self) -> str:
        """The value of `Started.model_fingerprint`."""
        adapter = self.adapter and f"{ADAPTER_SEPARATOR}{self.adapter}"
        table = self.table and f"{TABLE_SEPARATOR}{self.table}"
        return f"{self.model}{adapter}{table}"


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """Defaults for unset fields, from the router's settings and generation_config.json."""
    dtype: str
    tokenizer_fingerprint: str
    """Hex digest of the tokenizer files."""
    has_chat: bool
    """Whether there is a chat template."""
    vision: Vision | None = None
    """None if the model does not support images."""

    def top_k(self, value: int) -> int:
        """`value`, or 0 (no filter) if it covers the whole vocabulary."""
        return value if value < self.vocab_size else 0


def describe(checkpoint: Checkpoint, default_sampling: Mapping[str, float] = {}) -> ServedModel:
    """`default_sampling` takes precedence over generation_config.json. Raises CheckpointError if one of those is out
    of range."""
    return ServedModel(
        name=checkpoint.name,
        vocab_size=checkpoint.vocab_size,
        max_context_tokens=checkpoint.max_context_tokens,
        eos_token_ids=checkpoint.eos_token_ids,
        sampling=_sampling_defaults(checkpoint, default_sampling),
        dtype=str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"),
        tokenizer_fingerprint=checkpoint.tokenizer_fingerprint,
        has_chat=checkpoint.has_chat,
        vision=checkpoint.vision,
    )


def _sampling_defaults(checkpoint: Checkpoint, settings: Mapping[str, float]) -> SamplingParams:
    generation = checkpoint.generation
    values = {name: generation[name] for name in DEFAULT_NAMES if generation.get(name) is not None}
    for name, value in values.items():
        if problem := default_problem(name, value):
            raise CheckpointError(f"{checkpoint.path / 'generation_config.json'}: {name} {problem}")
    if generation.get("do_sample") is False:
        values["temperature"] = 0.0
    values |= settings
    defaults: dict[str, Any] = {name: _as_float32(value) for name, value in values.items()}
    if TOP_K in values:
        defaults[TOP_K] = int(values[TOP_K]) if values[TOP_K] < checkpoint.vocab_size else 0
    return SamplingParams(**defaults)


def _as_float32(value: float) -> float:
    # The API's floats have 32 bits, and a default of 0.7 must equal a 0.7 sent by a client.
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


PROMPT_BYTES_PER_TOKEN = 32
SMALLEST_PROMPT_BYTES = 64 << 10
LARGEST_PROMPT_BYTES = 8 << 20
MAX_MESSAGES = 4096
"""Messages of a chat."""
SMALLEST_PROMPT_IDS = 1 << 16
"""Number of ids accepted even if the context is short, because truncate_prompt_tokens may shorten the prompt."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the fields of one request. All but the first three are constants."""

    prompt_bytes: int
    prompt_ids: int
    n: int = 128
    logprobs: int = 20
    """Alternatives per token. The wire format allows no more, see `sluice.wire.message`."""
    prompt_logprobs: int = 1 << 18
    """Values for all prompt tokens together, including alternatives: they are sent in one message, about 30 bytes
    each."""
    stop_strings: int = 32
    """The detokenizer searches for each of them in every new text."""
    stop_bytes: int = 1024
    """Length of one stop string: this much text may be held back."""
    logit_bias: int = 1024
    """Entries of logit_bias."""
    guide_bytes: int = 65_536
    """Length of a regex, schema or grammar, or of all choices together."""
    bad_words: int = 256
    bad_word_bytes: int = 256
    """Length of one bad word."""
    kept_tokens: int = 64
    kept_token_bytes: int = 256
    """Length of a text in keep_special_tokens."""
    prompt_tail: int = 64
    """Tokens whose text is returned."""
    logits_processors: int = 16
    processor_name_bytes: int = 256
    ngram_size: int = 16
    """Maximum of no_repeat_ngram_size: an engine stores every n-gram."""
    draft_tokens: int = 64
    """Draft tokens per output and step."""
    draft_logits_bytes: int = MAX_DRAFT_LOGITS_BYTES
    listed_ids: int = 16_384
    """Ids in each of bad_token_ids, allowed_token_ids and stop_token_ids."""
    messages: int = MAX_MESSAGES
    salt_bytes: int = 256
    retention_ranges: int = 64
    retention_time: float = 30 * 86_400.0
    """Seconds; for any duration in kv_cache."""
    time_limit: float = 86_400.0
    """Seconds."""


def limits_of(settings: ClientLimits, context_tokens: int) -> Limits:
    by_context = min(max(context_tokens * PROMPT_BYTES_PER_TOKEN, SMALLEST_PROMPT_BYTES), LARGEST_PROMPT_BYTES)
    return Limits(settings.max_prompt_bytes or by_context, max(4 * context_tokens, SMALLEST_PROMPT_IDS), settings.max_n)


def check_model(name: str, model: ServedModel, field: str) -> None:
    """Raises RequestError MODEL_NOT_FOUND unless `name` is the served model or empty."""
    if name not in ("", model.name):
        message = f"{field} is {shown(name)}; the model served here is {model.name!r}"
        metadata = {"model": shown(name), "served": model.name}
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, message, metadata=metadata, private=True)
