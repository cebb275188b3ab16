"""The tensors of the model that a request asks for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from router.errors import Reason, RequestError, Violations, shown
from router.peers.offers import Need, named_need
from router.requests.part import Part
from router.requests.token_log import RequestLog
from sluice.v1 import generation_pb2 as pb
from sluice.wire.tensors import CONTEXT_LOGITS, GENERATION_LOGITS, LOGITS_NAMES, MAX_NAMES, TensorParams


@dataclass(frozen=True)
class Tensors:
    fields = frozenset(
        {"output.context_logits", "output.generation_logits", "output.tensors", "resume", "resume_context_rows"}
    )

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "_Tensors | None":
        wanted = _parse(message, bad)
        return _Tensors(wanted) if wanted else None


@dataclass(frozen=True, slots=True)
class _Tensors(Part):
    wanted: TensorParams

    def needs(self) -> Iterator[Need]:
        # Every engine has logits.
        for i, name in enumerate(name for name in self.wanted.output if name not in LOGITS_NAMES):
            yield named_need("tensor", name, f"spec.output.tensors[{i}].name", "tensors", "named tensors")

    def prepare(self, prompt_tokens: int, log: RequestLog) -> None:
        if self.wanted.context_rows > prompt_tokens:
            description = f"is {self.wanted.context_rows}, but the prompt has {prompt_tokens} tokens"
            raise RequestError.at("spec.resume_context_rows", description)
        log.expect_tensors(self.wanted, prompt_tokens)

    def submitted(self, log: RequestLog) -> dict[str, Any]:
        return {} if log.tensors is None else {"tensors": log.tensors.missing(log.live)}


def _parse(spec: pb.GenerationSpec, bad: Violations) -> TensorParams:
    output = spec.output
    names = _names(output, bad)
    context = (CONTEXT_LOGITS,) * output.context_logits
    context += tuple(tensor.name for tensor in output.tensors if tensor.context)
    wanted = TensorParams(
        context,
        (GENERATION_LOGITS,) * output.generation_logits + names,
        spec.resume_context_rows,
        {part.index: part.tensor_rows for part in spec.resume if part.tensor_rows},
    )
    for field, value in _conflicts(spec) if wanted else ():
        bad.add(field, f"{value}, cannot be combined with tensors in spec.output", reason=Reason.CONFLICT)
    _check_rows(spec, wanted, bad)
    return wanted


def _names(output: pb.OutputOptions, bad: Violations) -> tuple[str, ...]:
    field, names = "spec.output.tensors", [tensor.name for tensor in output.tensors]
    if not bad.at_most(field, len(names), MAX_NAMES, "tensors"):
        return ()
    for i, name in enumerate(names):
        if not name or name in LOGITS_NAMES:
            bad.add(
                f"{field}[{i}].name",
                f"is {shown(name)}, must be a name that GetModelInfo lists",
                reason=Reason.UNKNOWN_VALUE,
            )
        elif name in names[:i]:
            bad.add(f"{field}[{i}].name", f"is {shown(name)}, which occurs twice", reason=Reason.DUPLICATE)
    return tuple(names)


def _conflicts(spec: pb.GenerationSpec) -> list[tuple[str, str]]:
    """(field, description of its value) for each field that cannot be combined with tensors."""
    conflicts = []
    if spec.sampling.beam_search.width > 1:
        conflicts.append(("spec.sampling.beam_search", "is set"))
    if spec.HasField("best_of") and spec.best_of > (spec.n if spec.HasField("n") else 1):
        conflicts.append(("spec.best_of", f"is {spec.best_of}"))
    return conflicts


def _check_rows(spec: pb.GenerationSpec, wanted: TensorParams, bad: Violations) -> None:
    if spec.resume_context_rows and not wanted.context:
        bad.add(
            "spec.resume_context_rows",
            f"is {spec.resume_context_rows}, must be 0: the request asks for no tensors of the prompt",
            reason=Reason.CONFLICT,
        )
    for i, part in enumerate(spec.resume):
        limit = len(part.token_ids) if wanted.output else 0
        if part.tensor_rows > limit:
            bad.add(
                f"spec.resume[{i}].tensor_rows",
                f"is {part.tensor_rows}, must be at most {limit}",
                reason=Reason.OUT_OF_RANGE,
            )
