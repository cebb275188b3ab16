"""How many alternatives a request asks for with the log-probability of each token."""

from router.errors import Violations
from router.validate.model import Limits, Model
from sluice.wire.params import Range


def parse_count(field: str, count: int, model: Model, limits: Limits, bad: Violations) -> int:
    bad.within(field, count, Range(0, limits.logprobs))
    return min(count, model.vocab_size)
