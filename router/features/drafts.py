"""The caller's draft tokens, and the distributions from which they were sampled."""

from dataclasses import dataclass
from typing import Any, Literal, cast

from router.errors import Reason, Violations, shown
from router.parse.model import Limits, ServedModel
from router.requests.part import Part
from router.requests.token_log import RequestLog
from sluice.v1 import generation_pb2 as pb
from sluice.wire.params import DraftLogits, Range, Speculation
from sluice.wire.tensors import BYTES

FIELD = "spec.speculation"
DTYPES = ("float32", "bfloat16", "float16")
NO_SPECULATION = Speculation()
THRESHOLD_RANGE = Range(0, 1, above=True)


@dataclass(frozen=True)
class Drafts:
    fields = frozenset({"speculation"})

    _model: ServedModel
    _limits: Limits

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "_Drafts | None":
        speculation = _parse(message.speculation, self._model, self._limits, bad)
        return None if speculation == NO_SPECULATION else _Drafts(speculation)


@dataclass(frozen=True, slots=True)
class _Drafts(Part):
    speculation: Speculation

    def submitted(self, _: RequestLog) -> dict[str, Any]:
        return {"speculation": self.speculation}


def _parse(message: pb.Speculation, model: ServedModel, limits: Limits, bad: Violations) -> Speculation:
    max_draft_tokens = None
    if message.HasField("max_draft_tokens"):
        max_draft_tokens = message.max_draft_tokens
        bad.within(f"{FIELD}.max_draft_tokens", max_draft_tokens, Range(0, limits.draft_tokens))
    field, ids = f"{FIELD}.draft_token_ids", message.draft_token_ids
    if bad.at_most(field, len(ids), model.max_context_tokens, "ids"):
        bad.token_ids(field, ids, model.vocab_size)
    logits = _draft_logits(message, model, limits, bad) if message.HasField("draft_logits") else None
    threshold = None
    if message.HasField("acceptance_threshold"):
        threshold = message.acceptance_threshold
        bad.within(f"{FIELD}.acceptance_threshold", threshold, THRESHOLD_RANGE)
        if not message.HasField("draft_logits"):
            problem = f"is {threshold:g}, must be unset without draft_logits: draft tokens are then compared exactly"
            bad.add(f"{FIELD}.acceptance_threshold", problem, reason=Reason.OUT_OF_RANGE)
    return Speculation(max_draft_tokens, tuple(ids), logits, None if logits is None else threshold)


def _draft_logits(message: pb.Speculation, model: ServedModel, limits: Limits, bad: Violations) -> DraftLogits | None:
    """The logits. Their values are checked by the engine, since that would block the event loop here."""
    field, count = f"{FIELD}.draft_logits", len(message.draft_token_ids)
    dtype, data = message.draft_logits.dtype, message.draft_logits.data
    if not count:
        bad.add(field, "is set, must be unset without draft_token_ids", reason=Reason.CONFLICT)
        return None
    if dtype not in DTYPES:
        bad.add(f"{field}.dtype", f"is {shown(dtype)}, must be one of {', '.join(DTYPES)}", reason=Reason.UNKNOWN_VALUE)
        return None
    if not bad.at_most(f"{field}.data", len(data), limits.draft_logits_bytes, "bytes"):
        return None
    size = count * model.vocab_size * BYTES[dtype]
    if len(data) != size:
        row = f"{model.vocab_size} logits in {dtype} for each of {count} draft tokens"
        bad.add(f"{field}.data", f"has {len(data)} bytes, must have {size}: {row}", reason=Reason.INVALID_FORMAT)
        return None
    return DraftLogits(cast(Literal["float32", "bfloat16", "float16"], dtype), data)
