"""Finds differences that are due to rounding alone: two tokens were almost equally likely, and either may be sampled.

A resumed attempt computes the earlier tokens in larger batches than those in which they were sampled, so that sums are
in a different order. If the undisturbed request also samples the other token when it is merely resumed at some
position, the difference is not a consequence of a death.
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
        # Ignore the faults of this stream, because it starts in the middle of an output.
        continued = await read_stream(client, replace(seen.request, options=options))
        if len(continued.outputs) <= index:
            return False
        found = there.token_ids[:position] + continued.outputs[index].token_ids
        return found[: same + 1] == here.token_ids[: same + 1]

    return any(await asyncio.gather(*map(after, range(1, same + 1))))
