"""What the front door knows of the model: names, sizes, end tokens, and the defaults of generation_config.json."""

import struct
from dataclasses import dataclass
from typing import Any

from router.validate.ranges import SAMPLING_RANGES
from sluice.ring.checkpoint import Checkpoint, CheckpointError
from sluice.ring.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Model:
    """The one model behind this router."""

    name: str
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """What a request gets where it says nothing."""
    dtype: str
    tokenizer_fingerprint: str
    """Hex; of the tokenizer files only."""
    has_chat: bool

    def top_k(self, asked: int) -> int:
        """To keep the whole vocabulary is to filter nothing."""
        return asked if asked < self.vocab_size else 0


def describe(checkpoint: Checkpoint) -> Model:
    """Read a checkpoint's description. Raises CheckpointError where generation_config.json is out of range."""
    return Model(
        name=checkpoint.name,
        vocab_size=checkpoint.vocab_size,
        max_context_tokens=checkpoint.max_context_tokens,
        eos_token_ids=checkpoint.eos_token_ids,
        sampling=_sampling_defaults(checkpoint),
        dtype=str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "float32"),
        tokenizer_fingerprint=checkpoint.tokenizer_fingerprint,
        has_chat=checkpoint.chat_template is not None,
    )


def _sampling_defaults(checkpoint: Checkpoint) -> SamplingParams:
    found: dict[str, Any] = {}
    for name, allowed in SAMPLING_RANGES.items():
        value = checkpoint.generation.get(name)
        if value is None:
            continue
        problem = allowed.problem(value) if type(value) in (int, float) else f"is {value!r}, no number"
        if problem:
            raise CheckpointError(f"{checkpoint.path / 'generation_config.json'}: {name} {problem}")
        found[name] = _as_float32(value)
    top_k = checkpoint.generation.get("top_k")
    if top_k is not None:
        if type(top_k) is not int or top_k < 0:
            raise CheckpointError(f"{checkpoint.path / 'generation_config.json'}: top_k is {top_k!r}, not 0 or more")
        found["top_k"] = top_k if top_k < checkpoint.vocab_size else 0
    if checkpoint.generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingParams(**found)


def _as_float32(value: float) -> float:
    # The API's floats have 32 bits: an unset 0.7 and a sent 0.7 must be the same number.
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
