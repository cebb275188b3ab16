"""Beam search over the scripted model's candidates, without KV cache and steps: the oracle of the engine's."""

from engine_worker.beams import BeamSearch
from sluice.wire.errors import FinishReason
from sluice.wire.requests import Submit
from sluice.wire.tables import VirtualTokens
from tests.fakes.adapters import initial_digest
from tests.fakes.scripted_tokens import VOCAB, candidates, digest, shown_to_model
from tests.fakes.submits import extras_of


def search_alone(spec: Submit) -> list[tuple[list[int], FinishReason]]:
    """All finished hypotheses and how they ended, the best first."""
    start = initial_digest(spec.adapter_version)
    search, stopping = BeamSearch(spec.sampling.beam_search, spec.stopping), spec.stopping
    prompt = shown_to_model(spec.prompt, VirtualTokens.of(VOCAB, extras_of(spec).tables))
    beams: list[list[int]] = [[]]
    while not search.ended:
        banned = stopping.eos_token_ids + stopping.stop_token_ids
        per_beam = [
            candidates(digest([*prompt, *beam], start), banned if len(beam) < stopping.min_tokens else ())
            for beam in beams
        ]
        children = search.advance([best[: search.num_candidates] for best in per_beam])
        beams = [[*beams[child.parent], child.token] for child in children]
    return [([step.token for step in hypothesis.path.steps()], hypothesis.reason) for hypothesis in search.finished]
