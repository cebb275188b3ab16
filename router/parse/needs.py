"""What a request needs that not every engine offers."""

from collections.abc import Callable, Iterable, Sequence, Set
from itertools import groupby
from typing import NamedTuple

from router.errors import Reason, RequestError, Violation, shown
from sluice.wire.offers import LORA, Kind, offer, values_of


class Need(NamedTuple):
    """One offer that a request's engine must make."""

    kind: Kind
    value: str
    noun: str
    """What it is, in the plural, for the error if no engine that offers it is available."""
    shown: str
    """Which one it is, for the same error. Empty if the noun says it."""
    refuse: Callable[[Sequence[str]], Violation]
    """The violation if no known engine offers it, given the values of this kind that engines do offer, sorted."""

    @property
    def offer(self) -> str:
        return LORA if self.kind == LORA else offer(self.kind, self.value)


def named_need(kind: Kind, name: str, field: str, noun: str, missing: str = "") -> Need:
    """The need of what engines know by name. `missing`: what an engine without any of this kind lacks; the same as the
    noun if empty."""

    def refuse(names: Sequence[str]) -> Violation:
        problem = f"must be one of: {', '.join(names)}" if names else f"but no engine has {missing or noun}"
        return Violation(field, f"is {shown(name)}, {problem}", reason=Reason.UNKNOWN_VALUE)

    return Need(kind, name, noun, shown(name), refuse)


def check_needs(needs: Iterable[Need], known: Set[str] | None) -> None:
    """Raises RequestError with everything that no engine offers. `known`: what engines offer; None if no engine has
    reported yet."""
    if known is None:
        return
    unmet = [need for need in needs if need.offer not in known]
    if unmet:
        raise RequestError.invalid([need.refuse(sorted(values_of(need.kind, known))) for need in unmet])


def described(needs: Iterable[Need]) -> str:
    """The needs in an error message."""
    by_noun = groupby(needs, key=lambda need: need.noun)
    return " and ".join(f"{noun} {', '.join(need.shown for need in alike)}".rstrip() for noun, alike in by_noun)
