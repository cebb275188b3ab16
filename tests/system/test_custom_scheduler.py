"""A real ring whose engine runs the example scheduler of docs/scheduling.md."""

import pytest

from sluice import Client
from sluice.launch import Ring
from sluice.launch.local_ring import RingError
from tests.fakes.scheduling_page import example

PROMPT = "def fibonacci(n):"
WATCHED = """
from pathlib import Path

original = FairShare.schedule_request


def watched(self, active):
    Path(__file__).with_name("called").touch()
    return original(self, active)


FairShare.schedule_request = watched
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's working directory, with the scheduler and the engine's settings."""
    (tmp_path / "fair.py").write_text(example() + WATCHED)
    (tmp_path / "engine.yaml").write_text("capacity_scheduler_policy: fair:FairShare\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_the_scheduler_of_the_page_changes_no_text(folder, ring):
    with Client(ring.address) as client:
        expected = client.generate(PROMPT, max_tokens=24, temperature=0).text
    with Ring(engines=1, detokenizers=1, engine_args={"config": folder / "engine.yaml"}) as fair:
        assert not (folder / "called").exists()
        with Client(fair.address) as client:
            streams = [
                client.stream(PROMPT, max_tokens=24, temperature=0, kv_cache={"salt": salt}) for salt in "aaabbc"
            ]
            texts = ["".join(chunk.text for chunk in stream) for stream in streams]
    assert texts == [expected] * 6
    assert (folder / "called").exists()


@pytest.mark.long
def test_a_scheduler_that_cannot_be_loaded_fails_the_start_with_the_reason(folder):
    settings = {"config": folder / "engine.yaml", "scheduler": "fair:Unfair"}
    (folder / "engine.yaml").write_text("max_batch_size: 4\n")
    with pytest.raises(RingError, match=r"scheduler: 'fair:Unfair' cannot be used: AttributeError: .*Unfair"):
        Ring(engines=1, detokenizers=1, engine_args=settings).start()
