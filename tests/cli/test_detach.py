"""`sluice serve --detach` with a stand-in for the job. tests/launch/test_ray_job.py tests the job itself."""

import importlib
import json

import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.cli.serve import job_arguments
from sluice.launch.errors import RingError
from sluice.launch.logs import launcher_line

READY = launcher_line("launcher", "ready", "info", model="tiny", addresses=["10.0.0.7:50051"])


class Job:
    id = "sluice-1"
    arguments: tuple = ()
    error: BaseException | None = None

    def __init__(self, *arguments) -> None:
        type(self).arguments = arguments

    async def ready(self, _):
        if self.error is not None:
            raise self.error
        return READY


@pytest.fixture
def job(monkeypatch) -> type[Job]:
    pytest.importorskip("ray", reason="the package ray is not installed: pip install 'sluice-serve[ray]'")
    job_class = type("ThisJob", (Job,), {})
    monkeypatch.setattr(importlib.import_module("sluice.launch.ray_job"), "RayJob", job_class)
    return job_class


def serve(*arguments: str):
    return CliRunner().invoke(app, ["serve", *arguments])


def events(result) -> dict[str, dict]:
    return {line["event"]: line for line in map(json.loads, result.stderr.splitlines())}


def test_the_job_runs_the_same_command_on_the_cluster(job) -> None:
    result = serve("some/model", "--on", "ray=10.0.0.1:6379", "--detach", "--engines", "2", "--drain-timeout", "5")
    assert result.exit_code == 0, result.output
    arguments = ["serve", "some/model", "--on", "ray=10.0.0.1:6379", "--engines", "2", "--drain-timeout", "5"]
    assert job.arguments == ("10.0.0.1:6379", [*arguments, "--on", "ray=auto"], 20.0)
    assert events(result)["submitted"]["job"] == "sluice-1"
    assert events(result)["ready"]["addresses"] == ["10.0.0.7:50051"]


def test_a_ring_that_fails_to_start_is_reported(job) -> None:
    job.error = RingError("job sluice-1 has ended: no such model")
    result = serve("--on", "ray", "--detach")
    assert result.exit_code == 1
    assert events(result)["start_failed"]["error"] == "job sluice-1 has ended: no such model"


def test_ctrl_c_ends_the_wait_but_not_the_job(job) -> None:
    job.error = KeyboardInterrupt()
    result = serve("--on", "ray", "--detach")
    assert result.exit_code == 0
    assert events(result)["detached"]["job"] == "sluice-1"


def test_only_a_cluster_can_run_the_launcher() -> None:
    result = serve("--detach")
    assert result.exit_code == 1
    assert "--detach needs --on ray" in events(result)["start_failed"]["error"]


def test_options_stay_before_a_double_dash() -> None:
    assert job_arguments(["--detach", "--", "--model"]) == ["--on", "ray=auto", "--", "--model"]
