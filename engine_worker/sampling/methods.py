"""Groups the draws of a step by the method by which they are sampled."""

from collections import defaultdict
from collections.abc import Sequence

from engine_worker.sampling.candidates import Candidates
from engine_worker.sampling.choose import Filtered, Greedy, Unfiltered
from engine_worker.sampling.rejection import Rejection
from engine_worker.step import Draw
from sluice.wire.params import GREEDY_TEMPERATURE

Kind = type[Greedy] | type[Unfiltered] | type[Filtered] | type[Candidates] | type[Rejection]
SamplingMethod = tuple[Kind, bool]
"""How tokens are chosen, and whether the logits may be edited before that."""


def group_by_method(draws: Sequence[Draw]) -> dict[SamplingMethod, list[int]]:
    """Indices of the draws, by method."""
    groups: dict[SamplingMethod, list[int]] = defaultdict(list)
    # Runs for every draw of every step, hence one loop without calls.
    for i, draw in enumerate(draws):
        sampling = draw.sampling
        kind: Kind = Unfiltered
        if draw.candidates:
            kind = Candidates
        elif sampling.temperature < GREEDY_TEMPERATURE:
            kind = Greedy
        elif draw.proposal is not None:
            kind = Rejection
        elif sampling.top_k or sampling.top_p < 1.0:
            kind = Filtered
        listed = draw.banned or sampling.logit_bias or sampling.bad_token_ids or sampling.allowed_token_ids
        groups[kind, draw.rules is not None or bool(listed)].append(i)
    return groups
