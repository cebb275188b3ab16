"""Runs the launcher as a job of a Ray cluster, on its head node, so that the ring outlives the submitting process.

Ray's commands show and stop the job: `ray job list`, `ray job logs ID`, `ray job stop ID`.
"""

import math
import secrets
import shlex
from collections.abc import Sequence

from ray.exceptions import RayError
from ray.job_submission import JobSubmissionClient

from sluice.launch.environment import remote_environment
from sluice.launch.errors import RingError
from sluice.launch.logs import LAUNCHER, LogLine, Observe, parse_line

STOP_SECONDS = "RAY_JOB_STOP_WAIT_TIME_S"
"""Environment variable that tells Ray how long a job may take to stop."""


class RayJob:
    def __init__(self, address: str, arguments: Sequence[str], stop_seconds: float) -> None:
        """Submit `sluice ARGUMENTS`. Raises RingError.

        `address`: that of the cluster's job server, or one that `ray.init` accepts. Empty: Ray looks for a cluster.
        """
        environment = {**remote_environment(), STOP_SECONDS: str(math.ceil(stop_seconds))}
        try:
            self._client = JobSubmissionClient(address or None)
            self.id = self._client.submit_job(
                entrypoint=shlex.join(["sluice", *arguments]),
                submission_id=f"sluice-{secrets.token_hex(3)}",
                runtime_env={"env_vars": environment},
            )
        except (RayError, OSError, RuntimeError, ValueError) as error:
            raise RingError(
                f"the Ray cluster at {address or 'its default address'} does not accept the job: {error}"
            ) from error

    async def ready(self, observe: Observe) -> LogLine:
        """Wait for the launcher's `ready` line and return it. `observe` is called with all lines before it.

        Raises RingError if the job ends before that, or its log cannot be read.
        """
        rest, reason = "", ""
        try:
            async for text in self._client.tail_job_logs(self.id):
                *lines, rest = (rest + text).split("\n")
                for line in map(_read, lines):
                    if line.child == LAUNCHER and line.event == "ready":
                        return line
                    if line.child == LAUNCHER:
                        reason = line.start_error or reason
                    observe(line)
            reason = reason or self._client.get_job_info(self.id).message or "no reason was given"
        except (RayError, OSError, RuntimeError) as error:
            raise RingError(f"the log of job {self.id} cannot be read: {error}") from error
        raise RingError(f"job {self.id} has ended: {reason}")


def _read(text: str) -> LogLine:
    line = parse_line("job", text)
    return LogLine(str(line.fields.get("id", line.child)), text, line.fields)
