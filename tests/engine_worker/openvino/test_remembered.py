from pathlib import Path
from typing import NamedTuple

import pytest

from engine_worker.openvino.remembered import SUFFIX, remembered


class Answer(NamedTuple):
    text: str
    count: int


class Asked:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Answer:
        self.count += 1
        return Answer("it agrees", self.count)


def test_an_answer_is_remembered_by_its_question(tmp_path: Path) -> None:
    asked = Asked()
    for _ in range(2):
        assert remembered(tmp_path, ("a", 1), Answer, asked) == Answer("it agrees", 1)
    assert remembered(tmp_path, ("a", 2), Answer, asked) == Answer("it agrees", 2)


def test_without_a_folder_nothing_is_remembered() -> None:
    asked = Asked()
    assert [remembered(None, "a", Answer, asked).count for _ in range(2)] == [1, 2]


@pytest.mark.parametrize("content", [b"", b"{", b'["it agrees"]', b'["it agrees", "1"]', b"\xff"])
def test_a_damaged_answer_is_asked_for_again(tmp_path: Path, content: bytes) -> None:
    asked = Asked()
    remembered(tmp_path, "a", Answer, asked)
    (path,) = tmp_path.iterdir()
    assert path.suffix == SUFFIX
    path.write_bytes(content)
    assert [remembered(tmp_path, "a", Answer, asked).count for _ in range(2)] == [2, 2]


def test_a_folder_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    assert remembered(tmp_path / "gone", "a", Answer, Asked()).count == 1


def test_an_error_is_not_remembered(tmp_path: Path) -> None:
    def fail() -> Answer:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        remembered(tmp_path, "a", Answer, fail)
    assert not [*tmp_path.iterdir()]
