"""Collects everything that is wrong with a request, so that a client learns it at once."""

from collections.abc import Sequence

from router.errors import RequestError, Violation
from router.validate.ranges import Range

SHOWN_CHARACTERS = 64
LOGGED_CHARACTERS = 128


class Violations:
    """The fields of one request that cannot be taken."""

    def __init__(self) -> None:
        self.found: list[Violation] = []

    def add(self, field: str, description: str, private: bool = False) -> None:
        """Note one problem; `private` where the description quotes what the caller wrote."""
        self.found.append(Violation(field, description, private))

    def within(self, field: str, value: float, allowed: Range) -> None:
        """The value must lie in a range."""
        problem = allowed.problem(value)
        if problem:
            self.add(field, problem)

    def at_most(self, field: str, count: int, limit: int, unit: str) -> bool:
        """A count must not pass a limit; tells whether it holds."""
        if count > limit:
            self.add(field, f"has {count} {unit}, at most {limit} are taken")
            return False
        return True

    def token_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Every id must be one of the vocabulary; the first that is not gets named."""
        # The loop below takes ten times as long, and there may be millions.
        if max(ids, default=0) < vocab_size:
            return
        for i, token in enumerate(ids):
            if token >= vocab_size:
                self.add(f"{field}[{i}]", f"is {token}, the vocabulary has {vocab_size} tokens")
                return

    def ids(self, field: str, ids: Sequence[int], limit: int, vocab_size: int) -> tuple[int, ...]:
        """A list of ids as a set, sorted; at most `limit` of them, all in the vocabulary."""
        if not self.at_most(field, len(ids), limit, "ids"):
            return ()
        self.token_ids(field, ids, vocab_size)
        return tuple(sorted(set(ids)))

    def raise_if_any(self) -> None:
        """Raise RequestError INVALID_ARGUMENT with all of them."""
        if self.found:
            raise RequestError.invalid(self.found)


def logged(text: str) -> str:
    """A caller's text as a log line may hold it: printable and short; a request id as it is."""
    return ascii(text[:LOGGED_CHARACTERS])[1:-1]


def shown(value: object) -> str:
    """A value as an error message may show it: printable and short."""
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}… ({len(text)} characters)"
