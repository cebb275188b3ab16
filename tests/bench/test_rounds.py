from bench.harness.load import Load, PlannedRequest, Run, Trace
from bench.harness.topic import interleave


class Recorder:
    def __init__(self, name: str, calls: list) -> None:
        self.name = name
        self._calls = calls

    def run(self, load: Load) -> Run:
        self._calls.append((self.name, load))
        return Run(1.0, {}, [Trace(0.0, [1.0], [1], [])])


def test_systems_warm_up_take_turns_and_have_a_different_salt_per_round():
    calls = []
    a, b = Recorder("a", calls), Recorder("b", calls)
    load = Load([PlannedRequest([1, 2], 50), PlannedRequest([3], 1), PlannedRequest([4], 9)], width=2, salt="s")
    progress = []
    runs = interleave({"a": (a, load), "b": (b, load)}, 3, progress.append)
    assert [name for name, _ in calls] == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert [request.max_tokens for request in calls[0][1].requests] == [2, 1]
    assert [len(of_one) for of_one in runs] == [3, 3]
    assert len(progress) == len(calls)
    for name in "ab":
        salts = [load.salt for caller, load in calls if caller == name]
        assert len(set(salts)) == len(salts)
