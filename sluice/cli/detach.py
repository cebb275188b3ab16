"""`sluice serve --detach`: runs the launcher as a job of a Ray cluster."""

import asyncio
from collections.abc import Sequence
from itertools import takewhile

from sluice.launch import Display, OptionsError
from sluice.launch.hosts import RAY, place
from sluice.launch.supervisor import KILL_AFTER_SECONDS

DRAINS = 2
"""Number of times that `drain_timeout` may elapse while a ring stops: routers drain first, then the other services."""
ON_THE_CLUSTER = ("--on", "ray=auto")


def serve_detached(on: str, arguments: Sequence[str], drain_timeout: float, display: Display) -> None:
    """Submit `sluice serve ARGUMENTS` as a job and wait until the ring is ready. Raises OptionsError, RingError."""
    kind, address = place(on)
    if kind != RAY:
        raise OptionsError("--detach needs --on ray, where the cluster runs the launcher; on one machine use systemd")
    # ray takes seconds to import. `place` has checked that it is installed.
    from sluice.launch.ray_job import RayJob

    job = RayJob(address, ["serve", *job_arguments(arguments)], DRAINS * (drain_timeout + KILL_AFTER_SECONDS))
    display.say("submitted", f"job {job.id} starts the ring. Its log: ray job logs {job.id}", fields={"job": job.id})
    try:
        ready = asyncio.run(job.ready(display))
    except KeyboardInterrupt:
        text = f"the job {job.id} continues to run. To stop it: ray job stop {job.id}"
        display.say("detached", text, fields={"job": job.id})
        return
    addresses = list(ready.fields["addresses"])
    text = f"ready: {ready.fields['model']} on {','.join(addresses)}. To stop it: ray job stop {job.id}"
    display.say("ready", text, fields={"job": job.id, "model": ready.fields["model"], "addresses": addresses})


def job_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of `sluice serve` within the job: without --detach, and on the cluster that runs the job."""
    options = list(takewhile("--".__ne__, arguments))
    return [option for option in options if option != "--detach"] + [*ON_THE_CLUSTER, *arguments[len(options) :]]
