"""Requests that arrive over time, and a capacity scheduler whose answers are checked."""

from typing import NamedTuple

from hypothesis import strategies as st

from sluice.settings.engine import SchedulerNames
from sluice.wire.errors import FinishReason
from sluice.wire.requests import Submit
from tests.fakes.engine import EngineBench, spec_of
from tests.fakes.scripted_tokens import continuation

SHARED = [5 * i % 60 for i in range(40)]


class Arrival(NamedTuple):
    step: int
    shared: int
    """Prompt tokens that all requests have in common."""
    unshared: int
    """Prompt tokens after the shared ones."""
    max_tokens: int
    n: int
    priority: int
    cancelled_after: int | None
    """Steps until it is cancelled; None: it is not."""
    resumed: int
    """Limit on its resumed tokens."""


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        shared=st.integers(0, 24),
        unshared=st.integers(1, 12),
        max_tokens=st.integers(1, 24),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        priority=st.integers(1, 3),
        cancelled_after=st.sampled_from([None, None, None, None, 0, 3, 9]),
        resumed=st.sampled_from([0, 0, 1, 2, 7, 24]),
    ),
    min_size=1,
    max_size=14,
)
sizes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(15, 40),
        "max_batch_size": st.integers(1, 8),
        "max_tokens_per_step": st.integers(8, 40),
        "chunked_context": st.booleans(),
        "block_reuse": st.booleans(),
        "window": st.sampled_from([None, None, 12]),
    }
)


class Watched:
    """A capacity scheduler that passes each answer to `look`."""

    def __init__(self, scheduler, look):
        self._scheduler = scheduler
        self._look = look

    def schedule_request(self, active):
        before = [sequence for sequence in active if sequence.blocks]
        fitting, paused = self._scheduler.schedule_request(active)
        self._look(active, before, fitting, paused)
        return fitting, paused


def bench_of(policy: str, sizes: dict, look, **options) -> EngineBench:
    bench = EngineBench(schedulers=SchedulerNames(policy), **sizes, **options)
    scheduler = bench.engine._scheduler
    scheduler._capacity = Watched(scheduler._capacity, look)
    return bench


def resumed(spec: Submit, max_tokens: int) -> dict[int, list[int]]:
    """Resumed output of a request's sequences, at most `max_tokens` tokens each. The first of several may have none."""
    first = min(spec.n - 1, max_tokens % 3)
    outputs = ((i, continuation(spec.prompt, spec.stopping, spec.sampling.seed, i)) for i in range(first, spec.n))
    return {i: output[: max(0, max_tokens - i)] for i, output in outputs}


def play(bench: EngineBench, arrivals: list[Arrival], limit: int = 4000) -> None:
    """Run the requests and check that each ends by itself with its tokens, unless it was cancelled."""
    coming = sorted(enumerate(arrivals, 1), key=lambda entry: entry[1].step)
    cancels = {
        number: arrival.step + arrival.cancelled_after
        for number, arrival in coming
        if arrival.cancelled_after is not None
    }
    for step in range(limit):
        while coming and coming[0][1].step <= step:
            number, arrival = coming.pop(0)
            prompt = SHARED[: arrival.shared] + [60 + number + i for i in range(arrival.unshared)]
            fields = {"request": number, "n": arrival.n, "seed": number, "priority": arrival.priority}
            have = resumed(spec_of(prompt, arrival.max_tokens, **fields), arrival.resumed)
            bench.submit(prompt, arrival.max_tokens, resume=have, **fields)
        for number in [number for number, at in cancels.items() if at <= step]:
            bench.cancel(number)
            del cancels[number]
        busy = bench.step()
        if not coming and not busy and not bench.inbox and not bench.engine.live.requests:
            break
    else:
        raise AssertionError(f"still busy after {limit} steps")
    for number, arrival in enumerate(arrivals, 1):
        for index in range(arrival.n):
            reason = bench.ended(number, index)
            if reason is FinishReason.ABORTED:
                assert arrival.cancelled_after is not None
            else:
                assert bench.output(number, index) == bench.expected(number, index)
