"""When to stop: sluice.v1.StoppingCriteria, bounded."""

from dataclasses import dataclass

from router.validate.limits import Limits
from router.validate.model import Model
from router.validate.violations import Violations
from sluice.v1 import sampling_pb2

FIELD = "spec.stopping"


@dataclass(frozen=True, slots=True)
class Stopping:
    """Before the prompt's length is known."""

    max_tokens: int | None
    """None: what fits."""
    min_tokens: int
    strings: tuple[str, ...]
    token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    include_stop: bool


def parse_stopping(message: sampling_pb2.StoppingCriteria, model: Model, limits: Limits, bad: Violations) -> Stopping:
    """The caller's conditions on top of the model's own end tokens."""
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    if max_tokens == 0:
        bad.add(f"{FIELD}.max_tokens", "is 0, must be at least 1")
    most = model.max_context_tokens if max_tokens is None else max_tokens
    if message.min_tokens > most:
        bad.add(f"{FIELD}.min_tokens", f"is {message.min_tokens}, more than max_tokens or the context: {most}")
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        strings=_strings(message, limits, bad),
        token_ids=bad.ids(f"{FIELD}.stop_token_ids", message.stop_token_ids, limits.listed_ids, model.vocab_size),
        eos_token_ids=() if message.ignore_eos else model.eos_token_ids,
        include_stop=message.include_stop_in_output,
    )


def _strings(message: sampling_pb2.StoppingCriteria, limits: Limits, bad: Violations) -> tuple[str, ...]:
    if not bad.at_most(f"{FIELD}.stop", len(message.stop), limits.stop_strings, "stop strings"):
        return ()
    for i, stop in enumerate(message.stop):
        if not stop:
            bad.add(f"{FIELD}.stop[{i}]", "is empty")
        bad.at_most(f"{FIELD}.stop[{i}]", len(stop.encode()), limits.stop_bytes, "bytes")
    return tuple(dict.fromkeys(message.stop))
