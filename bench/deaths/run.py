"""Streams without pause over a ring whose services are killed, each compared with its undisturbed self."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.deaths.asked import mixed
from bench.deaths.killer import Death, Killer
from bench.deaths.played import Played
from bench.deaths.result import Plan, Result, Tally
from bench.deaths.streams import undisturbed, without_pause
from bench.memory import Watch
from bench.stats import thinned
from sluice import AsyncClient
from sluice.launch import Ring

RESUME_SECONDS = 120.0
PEER_SECONDS = 2.0
"""Of silence, after which a service is taken for dead."""
ENGINE: Mapping[str, Any] = {"kv_cache_tokens": 32_768, "max_batch_size": 64}

Tell = Callable[[str, int, int], None]
"""What is going on, how much is done, of how much."""


def measure(plan: Plan, tell: Tell = lambda *_: None) -> Result:
    """Start a ring, play everything once undisturbed, then again and again while services die."""
    with Ring(
        engines=plan.engines,
        detokenizers=plan.detokenizers,
        routers=plan.routers,
        engine_args={**ENGINE, "threads": plan.threads},
        router_args={"peer_timeout": PEER_SECONDS},
    ) as ring:
        return asyncio.run(_measure(ring, plan, tell))


async def _measure(ring: Ring, plan: Plan, tell: Tell) -> Result:
    asked = mixed(plan.streams, plan.max_tokens)
    watch = Watch(ring)
    async with AsyncClient(ring.addresses, resume_timeout=RESUME_SECONDS, retry_timeout=RESUME_SECONDS) as client:
        watching = asyncio.create_task(watch.run())
        ended = itertools.count(1)
        quiet = await undisturbed(client, asked, lambda: tell("undisturbed", next(ended), len(asked)))
        loop, tally = asyncio.get_running_loop(), Tally()
        began = loop.time()
        killer = Killer(ring, plan.seed)
        killing = asyncio.create_task(killer.run(plan.kills, plan.seconds_between))
        reading = asyncio.create_task(without_pause(client, asked, quiet, killing, tally.add))
        while not killing.done():
            await asyncio.wait({killing}, timeout=0.5)
            tell("streams run, services die", len(killer.deaths), plan.kills)
        await killing
        await reading
        seconds = loop.time() - began
        watching.cancel()
        watch.look()
    return _result(plan, killer.deaths, seconds, quiet, tally, watch, began - watch.began)


def _result(
    plan: Plan,
    deaths: list[Death],
    seconds: float,
    quiet: Sequence[Played],
    tally: Tally,
    watch: Watch,
    quiet_seconds: float,
) -> Result:
    return Result(
        plan,
        deaths,
        quiet_seconds,
        seconds,
        tally.streams,
        tally.failed,
        tally.wrong,
        tally.resumed,
        thinned([found.first_token for found in quiet]),
        thinned([found.stall for found in quiet]),
        thinned(tally.first),
        thinned(tally.stall),
        tally.faults,
        watch.trails,
    )
