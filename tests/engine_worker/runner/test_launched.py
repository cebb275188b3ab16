"""How the host waits for the results of a GPU, with a fake of CUDA's events."""

import pytest
import torch

from engine_worker.runner import launched
from engine_worker.runner.finished import Finished
from engine_worker.runner.launched import LaunchedStep, SampledResults, WaitTimer
from engine_worker.sampling.sampler import NO_RULES, Sampled


@pytest.fixture
def events(monkeypatch):
    """The options of each event that was created."""
    made = []

    class Event:
        def __init__(self, **options):
            made.append(options)

        def record(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launched, "on_host", lambda tensor: tensor)
    return made


@pytest.mark.parametrize(
    ("overlap", "flagged", "blocks"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_blocks_only_if_the_next_step_is_queued_before_the_wait(events, overlap, flagged, blocks):
    on_device = torch.empty(2, device="meta")
    SampledResults(
        Sampled(on_device, on_device, None, on_device if flagged else None), [], NO_RULES, overlapped=overlap
    )
    assert events == [{"blocking": blocks}]


def test_a_cpu_has_no_events(events):
    empty = torch.zeros(0)
    SampledResults(Sampled(empty, empty, None, None), [], NO_RULES, overlapped=True)
    assert events == []


class Recorded:
    """Results, and copies that were begun with them."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def drawn(self) -> list:
        self.log.append("drawn")
        return []

    def land(self) -> None:
        self.log.append("landed")


def test_a_step_is_complete_once_its_copies_are_on_the_host():
    step = Recorded()
    LaunchedStep(Finished.of(lambda: step), {}, None, [step], WaitTimer()).collect()
    assert step.log == ["drawn", "landed"]


def test_copies_without_results_are_awaited_too():
    step = Recorded()
    assert LaunchedStep(Finished.of(lambda: None), {}, None, [step], WaitTimer()).collect() == []
    assert step.log == ["landed"]
