import subprocess

import pytest

from bench import compare
from bench.harness.load import Run, Trace


class Stand:
    """A fake engine that takes a fixed time per token."""

    def __init__(self, seconds: float) -> None:
        self.name, self.salts = "stand-in", []
        self._seconds = seconds

    def run(self, load):
        self.salts.append(load.salt)
        traces = [Trace(0.0, [1.0], [request.max_tokens], [0] * request.max_tokens) for request in load.requests]
        return Run(self._seconds * load.tokens, {"engine": 2 * self._seconds}, traces)


def test_ratios() -> None:
    here, there = Stand(0.001), Stand(0.002)
    for measured, width in zip(compare.compare(here, there, 3, lambda _: None), compare.WIDTHS, strict=True):
        assert measured == (width, pytest.approx(2.0), (pytest.approx(2.0),) * 2, 0.5, pytest.approx(1000))
    assert here.salts == there.salts


def test_starts() -> None:
    starts = [compare.Compared(8, speed, (0.5, 2.0), speed / 2, 100.0) for speed in (0.9, 1.1, 1.0)]
    assert compare.over_starts(starts) == (8, 1.0, (0.9, 1.1), 0.5, 100.0)


def test_steps_without_the_model() -> None:
    costs = compare.own_code(Stand(0.001), Stand(0.002), lambda _: None)
    assert costs == [(pytest.approx(1e3 * width), pytest.approx(2e3 * width)) for width in compare.WIDTHS]
    starts = [compare.OwnCode(*each) for each in ((50.0, 60.0), (90.0, 61.0), (51.0, 62.0))]
    assert compare.own_over_starts(starts) == (51.0, 61.0)


def test_checkout() -> None:
    with compare.checkout("HEAD") as folder:
        assert (folder / "bench" / "systems" / "engine_alone.py").is_file()
    assert not folder.exists()
    with pytest.raises(subprocess.CalledProcessError), compare.checkout("no-such-revision"):
        pass


@pytest.mark.process
@pytest.mark.long
def test_whole(monkeypatch, capsys) -> None:
    monkeypatch.setattr(compare, "WIDTHS", (2,))
    monkeypatch.setattr(compare, "REQUESTS", 1)
    monkeypatch.setattr(compare, "STEPS", 8)
    monkeypatch.setattr(compare, "STEP_ROUNDS", 1)
    compare.main(["HEAD", "--starts", "1", "--rounds", "2", "--threads", "1"])
    printed = capsys.readouterr().out
    assert "speed / HEAD" in printed
    assert "a step without the model" in printed
