"""How an engine computes again the generated tokens whose keys and values are gone: after a death, a preemption, or in
a resumed request.

Kernels round a slice of several tokens differently from a single token: by 1e-6 in float32, by 1e-2 with int8 weights,
which changes sampled tokens. So a token has the same bits again only if it is computed in the same shape: the prompt in
slices of several tokens, generated tokens as if each were alone.
"""

from typing import NamedTuple, Protocol

from engine_worker.step import NO_LIMIT
from sluice.settings.engine import RecomputeMode


class Recompute(NamedTuple):
    """The exact way: with the same bits as when the tokens were generated."""

    tokens: int
    """Generated tokens of a sequence that one step computes."""
    separate: bool
    """Whether they are computed as if each were alone, see `Slice.separate`."""


class Kernels(Protocol):
    """See `Runner`."""

    exact: bool
    separates: bool


ONE_BY_ONE = Recompute(1, separate=False)
TOGETHER = Recompute(NO_LIMIT, separate=True)


def choose_recompute(mode: RecomputeMode, runner: Kernels) -> Recompute | None:
    """None: generated tokens are computed like those of a prompt, which is fast and may change their last bits."""
    if mode == "fast" or (mode == "auto" and not runner.exact):
        return None
    return TOGETHER if runner.separates else ONE_BY_ONE
