"""A job of a Ray cluster with a scripted job server. tests/system/test_ray_detach.py uses a real one."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from sluice.launch.errors import RingError
from sluice.launch.logs import launcher_line

pytest.importorskip("ray", reason="the package ray is not installed: pip install 'sluice-serve[ray]'")

from sluice.launch import ray_job

READY = launcher_line("launcher", "ready", "info", model="tiny", addresses=["10.0.0.7:50051"]).text
LOADING = json.dumps({"id": "engine-0", "event": "loading", "level": "info", "done": 1, "total": 2})


class Cluster:
    """A fake job server: the jobs that were submitted, and the log that it returns."""

    def __init__(self) -> None:
        self.submitted: dict = {}
        self.log: list[str] = []
        self.error: Exception | None = None
        self.message = "exit status 1"

    def submit_job(self, **job) -> str:
        if self.error is not None:
            raise self.error
        self.submitted = job
        return job["submission_id"]

    async def tail_job_logs(self, job: str):
        assert job == self.submitted["submission_id"]
        for text in self.log:
            yield text
        if self.error is not None:
            raise self.error

    def get_job_info(self, _: str) -> SimpleNamespace:
        return SimpleNamespace(message=self.message)


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    fake = Cluster()
    monkeypatch.setattr(ray_job, "JobSubmissionClient", lambda _: fake)
    return fake


def submit() -> ray_job.RayJob:
    return ray_job.RayJob("auto", ["serve", "a model", "--on", "ray=auto"], stop_seconds=12.5)


def test_the_job_runs_the_command_and_has_time_to_drain(cluster, monkeypatch) -> None:
    monkeypatch.setenv("SLUICE_ENGINE_DTYPE", "bfloat16")
    submit()
    assert cluster.submitted["entrypoint"] == "sluice serve 'a model' --on ray=auto"
    environment = cluster.submitted["runtime_env"]["env_vars"]
    assert environment["RAY_JOB_STOP_WAIT_TIME_S"] == "13"
    assert environment["SLUICE_ENGINE_DTYPE"] == "bfloat16"


def test_the_ready_line_is_returned(cluster) -> None:
    text = f"Running entrypoint\n{LOADING}\n{READY}\n{LOADING}\n"
    cluster.log = [text[:40], text[40:90], text[90:]]
    seen = []
    ready = asyncio.run(submit().ready(seen.append))
    assert ready.fields["addresses"] == ["10.0.0.7:50051"]
    assert [(line.child, line.event) for line in seen] == [("job", ""), ("engine-0", "loading")]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ([launcher_line("launcher", "start_failed", "error", error="no such model").text + "\n"], "no such model"),
        (["Traceback\n"], "exit status 1"),
    ],
)
def test_a_job_that_ends_before_it_is_ready_is_reported(cluster, log, reason) -> None:
    cluster.log = log
    with pytest.raises(RingError, match=rf"job sluice-[0-9a-f]+ has ended: {reason}"):
        asyncio.run(submit().ready(lambda _: None))


def test_a_log_that_cannot_be_followed_is_reported(cluster) -> None:
    job = submit()
    cluster.error = RuntimeError("WebSocket closed")
    with pytest.raises(RingError, match=r"the log of job .* cannot be read: WebSocket closed"):
        asyncio.run(job.ready(lambda _: None))


def test_a_cluster_that_refuses_the_job_is_reported(cluster) -> None:
    cluster.error = ConnectionError("refused")
    with pytest.raises(RingError, match="the Ray cluster at auto does not accept the job: refused"):
        submit()
