"""`sluice serve --detach`: the launcher runs as a job of a Ray cluster."""

import asyncio
from collections.abc import Sequence
from itertools import takewhile

from sluice.launch import Display, OptionsError
from sluice.launch.hosts import RAY, place
from sluice.launch.supervisor import KILL_AFTER_SECONDS

# Routers drain first, then the other services.
DRAINS = 2
ON_THE_CLUSTER = ("--on", "ray=auto")


def serve_detached(on: str, arguments: Sequence[str], drain_timeout: float, display: Display) -> None:
    """Submit `sluice serve ARGUMENTS` and wait until the ring is ready. Raises OptionsError, RingError."""
    kind, address = place(on)
    if kind != RAY:
        raise OptionsError("--detach needs --on ray, where the cluster runs the launcher; on one machine use systemd")
    from sluice.launch.ray_job import RayJob  # ray takes seconds to import, and may be missing: `place` has checked it

    job = RayJob(address, ["serve", *of_job(arguments)], DRAINS * (drain_timeout + KILL_AFTER_SECONDS))
    display.say("submitted", f"job {job.id} starts the ring. Its log: ray job logs {job.id}", fields={"job": job.id})
    try:
        ready = asyncio.run(job.ready(display))
    except KeyboardInterrupt:
        display.say("detached", f"the job goes on. To stop it: ray job stop {job.id}", fields={"job": job.id})
        return
    addresses = list(ready.fields["addresses"])
    text = f"ready: {ready.fields['model']} on {','.join(addresses)}. To stop it: ray job stop {job.id}"
    display.say("ready", text, fields={"job": job.id, "model": ready.fields["model"], "addresses": addresses})


def of_job(arguments: Sequence[str]) -> list[str]:
    """Without --detach, and on the cluster that the job is on."""
    options = list(takewhile("--".__ne__, arguments))
    return [each for each in options if each != "--detach"] + [*ON_THE_CLUSTER, *arguments[len(options) :]]
