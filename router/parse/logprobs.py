"""How many alternatives a request asks for with the log-probability of each token."""

from router.errors import Violations
from router.parse.model import Limits, ServedModel
from sluice.wire.sampling_ranges import Range


def parse_count(field: str, count: int, model: ServedModel, limits: Limits, bad: Violations) -> int:
    bad.within(field, count, Range(0, limits.logprobs))
    return min(count, model.vocab_size)
