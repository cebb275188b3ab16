"""What a router would have sent to an engine that is driven without a ring."""

from typing import Any

from sluice.ring.params import SamplingParams, StopParams, TextParams
from sluice.ring.wire import Submit

GREEDY = SamplingParams(temperature=0.0)
HERE = "inproc://here"
ATTEMPT = 0


def submit(number: int, prompt: list[int], max_tokens: int, sampling: SamplingParams = GREEDY, **more: Any) -> Submit:
    """`more`: further fields of Submit, such as `salt`."""
    return Submit(
        request=number,
        attempt=ATTEMPT,
        engine_epoch=1,
        name=str(number),
        prompt=prompt,
        n=1,
        sampling=sampling,
        stopping=StopParams(max_tokens=max_tokens),
        text=TextParams(),
        priority=2,
        time_limit=None,
        detokenizer=HERE,
        router=HERE,
        **({"salt": ""} | more),
    )
