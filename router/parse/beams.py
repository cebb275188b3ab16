"""Beam search: its parameters, and the fields that cannot be combined with it."""

from collections.abc import Iterator

import msgspec

from router.errors import Reason, Violations
from sluice.v1 import generation_pb2 as pb
from sluice.wire.message import MAX_SEQUENCES
from sluice.wire.params import GREEDY_TEMPERATURE, BeamSearchParams, Range, SamplingParams

LENGTH_PENALTY_RANGE = Range(-10, 10)
DIVERSITY_RANGE = Range(0, 100)


def parse_beams(spec: pb.GenerationSpec, sampling: SamplingParams, n: int, bad: Violations) -> SamplingParams:
    """`sampling`, with the beam search that `spec` requests. The model's defaults for random sampling do not apply.

    `n`: number of outputs.
    """
    message, field = spec.sampling.beam_search, "spec.sampling.beam_search"
    bad.within(f"{field}.width", message.width, Range(1, MAX_SEQUENCES))
    if message.HasField("length_penalty"):
        bad.within(f"{field}.length_penalty", message.length_penalty, LENGTH_PENALTY_RANGE)
    bad.within(f"{field}.diversity_rate", message.diversity_rate, DIVERSITY_RANGE)
    if message.early_stopping and message.exhaustive:
        bad.add(f"{field}.exhaustive", "is true, must be false or unset with early_stopping", reason=Reason.CONFLICT)
    if message.width <= 1:
        return sampling
    if n > message.width:
        bad.add(
            "spec.n",
            f"is {n}, must be at most spec.sampling.beam_search.width, which is {message.width}",
            reason=Reason.OUT_OF_RANGE,
        )
    for path, reason in _conflicts(spec):
        bad.add(path, f"{reason}, cannot be combined with spec.sampling.beam_search", reason=Reason.CONFLICT)
    return msgspec.structs.replace(
        sampling,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        # Outputs are returned with the sum of their logprobs, so the engine must report logprobs.
        logprobs=sampling.logprobs or 0,
        beam_search=BeamSearchParams(
            min(message.width, MAX_SEQUENCES),
            message.length_penalty if message.HasField("length_penalty") else 1.0,
            message.early_stopping,
            message.exhaustive,
            message.diversity_rate,
        ),
    )


def _conflicts(spec: pb.GenerationSpec) -> Iterator[tuple[str, str]]:
    """(field, description of its value) for each field that is in use and cannot be combined with beam search."""
    sampling, field = spec.sampling, "spec.sampling"
    values = {set_field.name: value for set_field, value in sampling.ListFields()}
    if sampling.temperature >= GREEDY_TEMPERATURE and sampling.temperature != 1.0:
        yield f"{field}.temperature", f"is {sampling.temperature:g}"
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if values.get(name, off) != off:
            yield f"{field}.{name}", f"is {values[name]:g}"
    lists = (
        (f"{field}.logits_processors", sampling.logits_processors),
        ("spec.stopping.stop", spec.stopping.stop),
        ("spec.resume", spec.resume),
    )
    for path, entries in lists:
        if entries:
            yield path, f"has {len(entries)} entries"
    if spec.HasField("best_of"):
        yield "spec.best_of", f"is {spec.best_of}"
    if spec.guided.WhichOneof("guide"):
        yield "spec.guided", "is set"
    if spec.speculation.max_draft_tokens or spec.speculation.draft_token_ids:
        yield "spec.speculation", "is set"
