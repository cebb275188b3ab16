"""Helpers to drive an engine's core without a ring: submits like those of a router, and a heap like an engine's."""

import gc

from engine_worker.hooks import Stop
from sluice.wire.params import SamplingParams, StopParams, TextParams
from sluice.wire.requests import Extras, Submit

GREEDY = SamplingParams(temperature=0.0)
HERE = "inproc://here"
ATTEMPT = 0


class Inbox:
    """Requests and stops that the engine fetches in its next step."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self.stops: list[Stop] = []

    def get_requests(self, limit: int) -> list[Submit]:
        taken, self.submits = self.submits[:limit], self.submits[limit:]
        return taken

    def get_stops(self) -> list[Stop]:
        taken, self.stops = self.stops, []
        return taken


def freeze_heap() -> None:
    """Makes the garbage collector ignore existing objects, as in the engine's process."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def submit(
    number: int,
    prompt: list[int],
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    *,
    n: int = 1,
    salt: str = "",
    extras: Extras | None = None,
) -> Submit:
    return Submit(
        request=number,
        attempt=ATTEMPT,
        engine_epoch=1,
        name=str(number),
        prompt=prompt,
        n=n,
        salt=salt,
        sampling=sampling,
        stopping=StopParams(max_tokens=max_tokens),
        text=TextParams(),
        priority=2,
        time_limit=None,
        detokenizer=HERE,
        router=HERE,
        extras=extras,
    )
