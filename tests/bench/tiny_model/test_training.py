import pytest
import torch

from bench.tiny_model import train
from bench.tiny_model.corpus import Windows, _functions, in_order
from bench.tiny_model.muon import Muon
from bench.tiny_model.train import Schedule


def rates(schedule: Schedule) -> list[float]:
    result: list[float] = []
    while not schedule.done(len(result)):
        result.append(schedule.rate(len(result)))
        schedule.observe(len(result))
    return result


def test_rate_warms_up_holds_and_decays() -> None:
    curve = rates(Schedule(minutes=0, steps=1000))
    assert len(curve) == 1000
    assert curve[:100] == sorted(curve[:100])
    assert set(curve[100:800]) == {1.0}
    assert curve[800:] == sorted(curve[800:], reverse=True)
    assert 0 < curve[-1] < 0.01


def test_a_run_limited_by_time_can_be_repeated_by_its_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(train.time, "monotonic", lambda: next(clock))
    timed = Schedule(minutes=10, steps=None)
    curve = rates(timed)
    assert len(curve) == 725  # one clock tick at the start, then one per step after the warm-up, to 480 = 80% of 600
    assert curve == rates(Schedule(minutes=0, steps=timed.total))


def test_windows_do_not_repeat_within_an_epoch_and_targets_are_shifted_by_one() -> None:
    windows = Windows(torch.arange(100), seed=0)
    rows = torch.cat([windows.next(length=8, count=2) for _ in range(5)])
    assert rows.shape == (10, 9)
    assert torch.equal(rows[:, 1:], rows[:, :-1] + 1)
    assert len(rows[:, 0].unique()) == 10
    assert torch.equal(Windows(torch.arange(100), seed=0).next(length=8, count=2), rows[:2])


def test_held_out_windows_are_in_order() -> None:
    assert [batch.tolist() for batch in in_order(torch.arange(10), length=2, count=2)] == [
        [[0, 1, 2], [2, 3, 4]],
        [[4, 5, 6], [6, 7, 8]],
    ]


def test_functions_are_split_after_the_docstring() -> None:
    source = '''
class A:
    def long(self):
        """Say it.

        At length.
        """
        return 1

    def bare(self):
        return 2
'''
    assert list(_functions(source)) == [
        ('def long(self):\n    """Say it.\n\n    At length.\n    """\n', "Say it.", "    return 1")
    ]


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_muon_steps_along_the_nearest_orthogonal_matrix(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.zeros(shape, requires_grad=True)
    u, _, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    weight.grad = u @ torch.diag(torch.linspace(0.2, 1, min(shape))) @ vh
    Muon([weight], lr=1.0).step()
    singular = torch.linalg.svdvals(weight.detach()) / (0.2 * max(shape) ** 0.5)
    assert singular.min() > 0.6
    assert singular.max() < 1.3
    assert torch.trace(-weight.detach() @ (u @ vh).T) > 0
