"""The fields of GenerationSpec that are rejected because they are not built yet."""

from collections.abc import Callable, Mapping

from router.errors import RequestError, Violation, Violations
from router.validate.model import Limits
from sluice.ring.errors import ErrorCode
from sluice.v1.generation_pb2 import GenerationSpec
from sluice.v1.sampling_pb2 import GuidedDecoding

REJECTED = frozenset(
    {
        "sampling.beam_search",
        "guided",
        "output.prompt_logprobs",
        "output.context_logits",
        "output.generation_logits",
        "output.tensors",
        "lora_id",
        "prompt_adapter_id",
        "speculation",
    }
)
"""A test walks the descriptor: it has a sample of each field of the .proto that is not in this table."""

GROUPS = frozenset(path.partition(".")[0] for path in REJECTED if "." in path)
"""Messages of which some fields are rejected."""

GUIDE_TEXTS = frozenset({"json_schema", "regex", "ebnf", "structural_tag"})

OFF: Mapping[str, Callable[[GenerationSpec], bool]] = {
    "sampling.beam_search": lambda spec: spec.sampling.beam_search.width == 1,
    "guided": lambda spec: spec.guided.WhichOneof("guide") is None,
    "speculation": lambda spec: (
        not spec.speculation.max_draft_tokens
        and (spec.speculation.HasField("max_draft_tokens") or not spec.speculation.draft_token_ids)
    ),
}
"""Whether a rejected field has a value that turns the feature off. All other rejected fields must be unset."""


def reject_unbuilt(spec: GenerationSpec, limits: Limits) -> None:
    """Raises RequestError: INVALID_ARGUMENT for an oversized guide, else NOT_BUILT_YET naming every rejected field."""
    if spec.HasField("guided"):
        _check_guide_size(spec.guided, limits)
    found = [f"spec.{path}" for path in sorted(_fields(spec) & REJECTED) if not (path in OFF and OFF[path](spec))]
    if found:
        raise RequestError(
            ErrorCode.NOT_BUILT_YET,
            f"not built yet: {', '.join(found)}",
            [Violation(path, "is not built yet: leave it unset or off") for path in found],
        )


def _check_guide_size(guide: GuidedDecoding, limits: Limits) -> None:
    kind = guide.WhichOneof("guide")
    bad = Violations()
    if kind == "choice":
        bad.at_most("spec.guided.choice.choices", guide.choice.ByteSize(), limits.guide_bytes, "bytes")
    elif kind in GUIDE_TEXTS:
        bad.at_most(f"spec.guided.{kind}", len(getattr(guide, kind).encode()), limits.guide_bytes, "bytes")
    bad.raise_if_any()


def _fields(spec: GenerationSpec) -> set[str]:
    """Paths of the fields that are set; of those within messages, only of GROUPS."""
    found = set()
    for field, value in spec.ListFields():
        found.add(field.name)
        if field.name in GROUPS:
            found.update(f"{field.name}.{inner.name}" for inner, _ in value.ListFields())
    return found
