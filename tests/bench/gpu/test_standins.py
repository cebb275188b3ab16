"""Compares the stand-ins with the real packages."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu import standins
from bench.gpu.standins import msgspec as stand_in
from tests.bench.gpu.without import WITHOUT_NUMBA


def kinds(package: Any) -> tuple[Any, Any]:
    class Base(package.Struct, frozen=True, array_like=True, tag=True):
        """The docstring."""

        number: int
        text: str = "text"

    class More(Base, frozen=True, omit_defaults=True):
        many: list[int] = []  # noqa: RUF012
        """An attribute docstring."""
        named: dict[str, int] = {}  # noqa: RUF012

        def __post_init__(self) -> None:
            if self.number < 0:
                raise ValueError("negative")

        @property
        def twice(self) -> int:
            return 2 * self.number

    return Base, More


PACKAGES = (msgspec, stand_in()[0])
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "number": st.integers(0, 3),
        "text": st.text(max_size=2),
        "many": st.lists(st.integers(), max_size=2),
        "named": st.dictionaries(st.text(max_size=1), st.integers(), max_size=2),
    },
)


def outcome(call: Any) -> Any:
    try:
        return call()
    except (TypeError, ValueError) as error:
        return type(error)


@pytest.mark.slow
@given(VALUES, VALUES)
def test_structs_are_those_of_msgspec(values, changes):
    def views(package: Any) -> Any:
        _, kind = kinds(package)
        made = kind(**values)
        changed = package.structs.replace(made, **changes)
        both = [package.structs.asdict(struct) for struct in (made, changed)]
        return both, made == changed, made == kind(**values), changed.twice, made != 1

    real, stand_ins = (outcome(lambda package=package: views(package)) for package in PACKAGES)
    assert stand_ins == real


@pytest.mark.parametrize(
    "use",
    [
        lambda package, base, more: base(1, "a", 3),
        lambda package, base, more: base(),
        lambda package, base, more: base(other=1),
        lambda package, base, more: more(-1),
        lambda package, base, more: package.structs.replace(base(1), other=2),
        lambda package, base, more: more(1).many is more(1).many,
        lambda package, base, more: base(1) == more(1),
        lambda package, base, more: hash(base(1)) == hash(base(1)),
        lambda package, base, more: outcome(lambda: hash(more(1))),
        lambda package, base, more: more(1, "a", [2], {"b": 3}).twice,
    ],
)
def test_standins_behave_like_msgspec(use):
    real, stand_ins = (outcome(lambda package=package: use(package, *kinds(package))) for package in PACKAGES)
    assert stand_ins == real


def test_a_struct_does_not_share_a_default():
    _, more = kinds(PACKAGES[1])
    first = more(1)
    first.many.append(2)
    assert more(1).many == []
    assert standins.asdict(first)["many"] == [2]


@pytest.mark.process
def test_all_modules_can_be_imported_without_optional_packages():
    command = [sys.executable, "-c", WITHOUT_NUMBA + "import bench.gpu.run, bench.gpu.session"]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
