"""Sequences for a KV cache without an engine."""

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import Request, Sequence
from sluice.wire.params import RetentionParams
from tests.fakes.engine import spec_of


def request(prompt, n: int = 1, retention: RetentionParams = RetentionParams(), number: int = 1) -> Request:  # noqa: B008
    return Request(spec_of(prompt, max_tokens=20, n=n, retention=retention), b"root", number, 0.0)


def one(prompt, retention: RetentionParams = RetentionParams(), number: int = 1) -> Sequence:  # noqa: B008
    return request(prompt, retention=retention, number=number).sequences[0]


def computed(cache: KvCacheManager, prompt, retention: RetentionParams = RetentionParams()) -> Sequence:  # noqa: B008
    """A holder whose whole prompt is computed."""
    sequence = one(prompt, retention)
    assert cache.allocate([sequence]) == [sequence]
    while sequence.num_pending:
        cache.commit(sequence, sequence.num_ready)
        assert cache.allocate([sequence]) == [sequence]
    return sequence
