"""Tensors of the model that a request asks for."""

from collections.abc import Set

from router.errors import Reason, RequestError, Violation, Violations, shown
from sluice.ring.tensors import CONTEXT_LOGITS, GENERATION_LOGITS, LOGITS_NAMES, MAX_NAMES, TensorParams
from sluice.v1 import generation_pb2 as pb


def parse_tensors(spec: pb.GenerationSpec, bad: Violations) -> TensorParams:
    output = spec.output
    names = _names(output, bad)
    context = (CONTEXT_LOGITS,) * output.context_logits + tuple(each.name for each in output.tensors if each.context)
    found = TensorParams(
        context,
        (GENERATION_LOGITS,) * output.generation_logits + names,
        spec.resume_context_rows,
        {part.index: part.tensor_rows for part in spec.resume if part.tensor_rows},
    )
    for field, reason in _conflicts(spec) if found else ():
        bad.add(field, f"{reason}, cannot be combined with tensors in spec.output", reason=Reason.CONFLICT)
    _check_rows(spec, found, bad)
    return found


def check_tensors(wanted: TensorParams, known: Set[str] | None) -> None:
    """Raises RequestError if no engine has one of these. `known`: what they have beside logits; None: no engine has
    said it."""
    if known is None:
        return
    bad = Violations()
    listed = ", ".join(sorted(known)) or "none, the engines have none"
    for i, name in enumerate(name for name in wanted.output if name not in LOGITS_NAMES):
        if name not in known:
            bad.add(
                f"spec.output.tensors[{i}].name",
                f"is {shown(name)}, must be one of: {listed}",
                reason=Reason.UNKNOWN_VALUE,
            )
    bad.raise_if_any()


def check_context_rows(wanted: TensorParams, prompt_tokens: int) -> None:
    """Raises RequestError if the caller says that it has more rows than there are."""
    if wanted.context_rows > prompt_tokens:
        description = f"is {wanted.context_rows}, the prompt has {prompt_tokens} tokens"
        raise RequestError.invalid([Violation("spec.resume_context_rows", description)])


def _names(output: pb.OutputOptions, bad: Violations) -> tuple[str, ...]:
    field, names = "spec.output.tensors", [each.name for each in output.tensors]
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
            bad.add(f"{field}[{i}].name", f"is {shown(name)}, which was given before", reason=Reason.DUPLICATE)
    return tuple(names)


def _conflicts(spec: pb.GenerationSpec) -> list[tuple[str, str]]:
    found = []
    if spec.sampling.beam_search.width > 1:
        found.append(("spec.sampling.beam_search", "is set"))
    if spec.HasField("best_of") and spec.best_of > (spec.n if spec.HasField("n") else 1):
        found.append(("spec.best_of", f"is {spec.best_of}"))
    return found


def _check_rows(spec: pb.GenerationSpec, wanted: TensorParams, bad: Violations) -> None:
    if spec.resume_context_rows and not wanted.context:
        bad.add(
            "spec.resume_context_rows",
            f"is {spec.resume_context_rows}, must be 0: no tensor of the prompt is asked for",
            reason=Reason.CONFLICT,
        )
    for i, part in enumerate(spec.resume):
        most = len(part.token_ids) if wanted.output else 0
        if part.tensor_rows > most:
            bad.add(
                f"spec.resume[{i}].tensor_rows",
                f"is {part.tensor_rows}, must be at most {most}",
                reason=Reason.OUT_OF_RANGE,
            )
