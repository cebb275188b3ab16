"""What the rules of beam search find with the scripted runner's candidates, without memory and steps."""

from engine_worker.beams import BeamSearch
from sluice.ring.errors import FinishReason
from sluice.ring.tables import VirtualTokens
from sluice.ring.wire import Submit
from tests.fakes.adapters import start_of
from tests.fakes.runner import VOCAB, candidates, digest, shown_to_model


def search_alone(spec: Submit) -> list[tuple[list[int], FinishReason]]:
    """All that was found, the best first."""
    start = start_of(None if spec.adapter is None else spec.adapter.version)
    search, stopping = BeamSearch(spec.sampling.beam_search, spec.stopping), spec.stopping
    prompt = shown_to_model(spec.prompt, VirtualTokens.of(VOCAB, spec.tables))
    beams: list[list[int]] = [[]]
    while not search.ended:
        banned = stopping.eos_token_ids + stopping.stop_token_ids
        best = [
            candidates(digest([*prompt, *beam], start), banned if len(beam) < stopping.min_tokens else ())
            for beam in beams
        ]
        children = search.advance([each[: search.num_candidates] for each in best])
        beams = [[*beams[child.parent], child.token] for child in children]
    return [([step.token for step in found.path.steps()], found.reason) for found in search.finished]
