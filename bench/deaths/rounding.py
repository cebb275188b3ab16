"""Which differences are those of rounding: two tokens were nearly as likely, and the one or the other is drawn.

An attempt computes the tokens that it continues after in larger batches than those in which they were drawn, and sums
in another order. If the undisturbed request draws the other token as well where it merely continues from some position,
no death has changed it.
"""

import asyncio
from collections.abc import Sequence
from itertools import count, takewhile

from msgspec.structs import replace

from bench.deaths.streams import StreamSeen, read_stream
from sluice import AsyncClient


async def count_rounded(client: AsyncClient, wrong: Sequence[tuple[StreamSeen, StreamSeen]]) -> int:
    """Number of streams that differ from their undisturbed counterparts only by rounding."""
    found = 0
    for seen, truth in wrong:
        if not seen.faults and len(seen.outputs) == len(truth.outputs):
            outputs = range(len(seen.outputs))
            found += all([await _is_rounded(client, seen, truth, index) for index in outputs])
    return found


async def _is_rounded(client: AsyncClient, seen: StreamSeen, truth: StreamSeen, index: int) -> bool:
    """Whether this output equals the undisturbed one, or a resume from some position continues like this output."""
    here, there = seen.outputs[index], truth.outputs[index]
    if not here.difference(there):
        return True
    if here.token_ids == there.token_ids or "beam_search" in seen.request.options:
        return False
    same = len(list(takewhile(lambda at: here.token_ids[at : at + 1] == there.token_ids[at : at + 1], count())))

    async def after(position: int) -> bool:
        resume = [{"index": index, "token_ids": there.token_ids[:position]}]
        options = {**seen.request.options, "resume": resume}
        # Ignore its faults, because it starts in the middle of an output.
        continued = await read_stream(client, replace(seen.request, options=options))
        if len(continued.outputs) <= index:
            return False
        found = there.token_ids[:position] + continued.outputs[index].token_ids
        return found[: same + 1] == here.token_ids[: same + 1]

    return any(await asyncio.gather(*map(after, range(1, same + 1))))
