"""Streams without pause, each compared with its undisturbed self."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from bench.deaths.asked import Asked
from bench.deaths.played import Played, play
from sluice import AsyncClient


async def undisturbed(client: AsyncClient, asked: Sequence[Asked], done: Callable[[], None]) -> list[Played]:
    """All at once, to their ends; `done` hears of each. Raises RuntimeError where one goes wrong by itself."""

    async def one(each: Asked) -> Played:
        found = await play(client, each)
        done()
        if found.faults:
            raise RuntimeError(f"an undisturbed stream went wrong: {found.faults[0]}")
        return found

    return list(await asyncio.gather(*map(one, asked)))


async def without_pause(
    client: AsyncClient,
    asked: Sequence[Asked],
    quiet: Sequence[Played],
    until: "asyncio.Task[Any]",
    add: Callable[[Played, Played], None],
) -> None:
    """Each again and again, until the task is done and the streams of that moment have ended.

    `add` gets each that ended, and what it is undisturbed.
    """

    async def again_and_again(each: Asked, truth: Played) -> None:
        while not until.done():
            add(await play(client, each), truth)

    await asyncio.gather(*(again_and_again(each, truth) for each, truth in zip(asked, quiet, strict=True)))
