"""--revision of each service, of the launcher and of the executor, which applies only to Hugging Face models."""

import subprocess
import sys

import pytest

from sluice import tiny_model
from sluice.checkpoint.errors import CheckpointError
from sluice.executor import GenerationExecutor
from sluice.launch import Ring

REFUSAL = "revision 'v2' applies only to Hugging Face models"


@pytest.mark.process
@pytest.mark.parametrize("module", ["router", "engine_worker", "detok_service"])
def test_a_service_refuses_a_revision_of_a_folder(module, tmp_path):
    command = [sys.executable, "-m", module, "--model", str(tiny_model.path()), "--revision", "v2"]
    command += ["--listen", f"ipc://{tmp_path}/inbox", *(["--port", "0"] if module == "router" else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert REFUSAL in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("start", [Ring, GenerationExecutor.create])
def test_the_launcher_and_the_executor_refuse_a_revision_of_a_folder(start):
    with pytest.raises(CheckpointError, match=REFUSAL):
        start(str(tiny_model.path()), revision="v2")


def test_the_launcher_downloads_the_model_once_its_weights_after_the_check(monkeypatch):
    """The services receive the folder, so that all use the same files."""
    downloads = []

    def download(model, **options):
        downloads.append((model, options["revision"], "*.safetensors" in options["allow_patterns"]))
        return str(tiny_model.path())

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    plan = Ring("someone/model", revision="v2").plan
    commit = tiny_model.path().name  # of a folder in the cache
    assert downloads == [("someone/model", "v2", False), ("someone/model", commit, True)]
    assert (plan.model, plan.name) == (str(tiny_model.path()), "someone/model")
