"""Streams without pause over a ring whose services are killed, each compared with its undisturbed self."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from bench.deaths.asked import Asked, mixed
from bench.deaths.killer import Killer
from bench.deaths.played import Played, play
from sluice import AsyncClient
from sluice.launch import Ring

RESUME_SECONDS = 120.0
PEER_SECONDS = 2.0
"""Of silence, after which a service is taken for dead."""
ENGINE: Mapping[str, Any] = {"threads": 1, "kv_cache_tokens": 32_768, "max_batch_size": 64}


class Plan(msgspec.Struct, frozen=True):
    """How much of it."""

    streams: int = 64
    """At a time."""
    kills: int = 50
    seconds_between: float = 2.0
    """From kill to kill, on average."""
    max_tokens: int = 200
    routers: int = 2
    engines: int = 2
    detokenizers: int = 3
    seed: int = 0


class Result(msgspec.Struct, frozen=True):
    """What became of the streams."""

    plan: Plan
    killed: dict[str, int]
    """By role."""
    seconds: float
    streams: int
    failed: int
    """Ended with an error."""
    wrong: int
    """Differ from the undisturbed run, errors included."""
    resumed: int
    """Had to go on at another connection, for their router died."""
    quiet_first: list[float]
    """Seconds to the first token, of undisturbed streams."""
    quiet_stall: list[float]
    """Longest pause of each, seconds."""
    first: list[float]
    stall: list[float]
    faults: list[str]
    """The first few, in words."""


Tell = Callable[[str, int, int], None]
"""What is going on, how much is done, of how much."""


def measure(plan: Plan, tell: Tell = lambda *_: None) -> Result:
    """Start a ring, play everything once undisturbed, then again and again while services die."""
    with Ring(
        engines=plan.engines,
        detokenizers=plan.detokenizers,
        routers=plan.routers,
        engine_args=dict(ENGINE),
        router_args={"peer_timeout": PEER_SECONDS},
    ) as ring:
        return asyncio.run(_measure(ring, plan, tell))


async def _measure(ring: Ring, plan: Plan, tell: Tell) -> Result:
    asked = mixed(plan.streams, plan.max_tokens)
    async with AsyncClient(ring.addresses, resume_timeout=RESUME_SECONDS, retry_timeout=RESUME_SECONDS) as client:
        quiet = await _once(client, asked, tell)
        for found in quiet:
            if found.faults:
                raise RuntimeError(f"an undisturbed stream went wrong: {found.faults[0]}")
        loop = asyncio.get_running_loop()
        began = loop.time()
        killer = Killer(ring, plan.seed)
        killing = asyncio.create_task(killer.run(plan.kills, plan.seconds_between))
        pairs = zip(asked, quiet, strict=True)
        readers = [asyncio.create_task(_again_and_again(client, each, truth, killing)) for each, truth in pairs]
        while not killing.done():
            tell("streams run, services die", sum(killer.killed.values()), plan.kills)
            await asyncio.wait({killing}, timeout=0.5)
        await killing
        compared = [pair for pairs in await asyncio.gather(*readers) for pair in pairs]
        return _result(plan, dict(killer.killed), loop.time() - began, quiet, compared)


async def _once(client: AsyncClient, asked: list[Asked], tell: Tell) -> list[Played]:
    done = 0

    async def one(each: Asked) -> Played:
        nonlocal done
        found = await play(client, each)
        done += 1
        tell("undisturbed", done, len(asked))
        return found

    return list(await asyncio.gather(*map(one, asked)))


async def _again_and_again(
    client: AsyncClient, asked: Asked, truth: Played, killing: "asyncio.Task[None]"
) -> list[tuple[Played, Played]]:
    found = []
    while not killing.done():
        found.append((await play(client, asked), truth))
    return found


def _result(
    plan: Plan, killed: dict[str, int], seconds: float, quiet: list[Played], compared: list[tuple[Played, Played]]
) -> Result:
    played = [found for found, _ in compared]
    wrong = [difference for found, truth in compared if (difference := found.difference(truth))]
    return Result(
        plan,
        killed,
        seconds,
        len(played),
        sum(bool(found.faults) for found in played),
        len(wrong),
        sum(bool(found.resumed) for found in played),
        [found.first_token for found in quiet],
        [found.stall for found in quiet],
        [found.first_token for found in played],
        [found.stall for found in played],
        wrong[:8],
    )
