"""Translation of kv_cache options for the engine."""

from dataclasses import replace
from itertools import pairwise

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError, Violations
from router.features.retention import parse_retention
from router.parse.model import limits_of
from sluice.settings.services import RouterSettings
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import KvCacheOptions, TokenRangeRetention
from sluice.wire.params import RangeRetention, RetentionParams
from tests.router.conftest import refused

LIMITS = limits_of(RouterSettings(model="m"), 2048)


def parsed(*ranges, **fields):
    bad = Violations()
    options = KvCacheOptions(prompt_retention=[TokenRangeRetention(**token_range) for token_range in ranges], **fields)
    retention = parse_retention(options, LIMITS, bad)
    bad.raise_if_any()
    return retention


def ids(count, **fields):
    return pb.GenerationSpec(token_ids=pb.TokenIds(ids=[5] * count), **fields)


async def test_the_engine_gets_the_requested_retention(client, ring):
    options = KvCacheOptions(
        prompt_retention=[
            TokenRangeRetention(start=20, priority=7),
            TokenRangeRetention(start=0, end=20, priority=100, duration=Duration(seconds=1, nanos=500_000_000)),
        ],
        decode_priority=0,
        decode_duration=Duration(seconds=2),
    )
    await client.generate(ids(30, kv_cache=options))
    assert ring.calls[0].submit.extras.retention == RetentionParams(
        prompt=(RangeRetention(0, 20, 100, 1.5), RangeRetention(20, 30, 7)), decode_priority=0, decode_seconds=2.0
    )
    await client.generate(ids(30))
    assert ring.calls[1].submit.extras is None


async def test_ranges_stay_with_their_tokens_when_the_prompt_is_truncated(client, ring):
    ranges = [(0, 10), (10, 25), (25, 30)]
    options = KvCacheOptions(prompt_retention=[TokenRangeRetention(start=a, end=b, priority=b) for a, b in ranges])
    await client.generate(ids(30, kv_cache=options, truncate_prompt_tokens=18))
    assert ring.calls[0].submit.extras.retention.prompt == (RangeRetention(0, 13, 25), RangeRetention(13, 18, 30))


async def test_values_and_limits_are_named(client):
    options = KvCacheOptions(prompt_retention=[TokenRangeRetention(start=30), TokenRangeRetention(start=2, end=31)])
    details = await refused(client.events(ids(30, kv_cache=options)))
    assert {violation.field: violation.description for violation in details.bad.field_violations} == {
        "spec.kv_cache.prompt_retention[0].start": "is 30, inside spec.kv_cache.prompt_retention[1],"
        " which ranges from 2 to 31"
    }
    details = await refused(client.events(ids(30, kv_cache=KvCacheOptions(prompt_retention=[{"end": 31}]))))
    assert details.bad.field_violations[0].description == "is 31, but the prompt has 30 tokens"


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12, unique=True), st.integers(1, 40), st.randoms())
def test_truncation_does_not_change_the_range_of_a_token(edges, kept_tokens, random):
    total = 40
    edges.sort()
    ranges = [{"start": start, "end": end, "priority": i} for i, (start, end) in enumerate(pairwise(edges)) if i % 3]
    priorities_before = {
        token: token_range["priority"]
        for token_range in ranges
        for token in range(token_range["start"], token_range["end"])
    }
    random.shuffle(ranges)
    params = parsed(*ranges).retention(RetentionParams(), total, kept_tokens).prompt
    assert all(0 <= part.start < part.end <= kept_tokens for part in params)
    assert [part.start for part in params] == sorted(part.start for part in params)
    priorities_after = {token: part.priority for part in params for token in range(part.start, part.end)}
    assert priorities_after == {
        token - total + kept_tokens: priority
        for token, priority in priorities_before.items()
        if token >= total - kept_tokens
    }


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12) | st.none()), max_size=4))
def test_accepted_ranges_are_within_the_prompt_and_do_not_overlap(ranges):
    total = 10
    closed = [(start, total if end is None else end) for start, end in ranges]
    tokens = [token for start, end in closed for token in range(start, end)]
    good = all(start < end <= total for start, end in closed) and len(tokens) == len(set(tokens))
    options = [{"start": start} | ({} if end is None else {"end": end}) for start, end in ranges]
    try:
        params = parsed(*options).retention(RetentionParams(), total, total)
    except RequestError:
        assert not good
    else:
        assert good
        assert [(part.start, part.end) for part in params.prompt] == sorted(closed)


@pytest.mark.parametrize("max_ranges", [0, 3])
def test_the_number_of_ranges_is_bounded(max_ranges):
    limits = replace(LIMITS, retention_ranges=max_ranges)
    bad = Violations()
    ranges = [TokenRangeRetention(start=i, end=i + 1) for i in range(max_ranges + 1)]
    parse_retention(KvCacheOptions(prompt_retention=ranges[:max_ranges]), limits, bad)
    assert not bad.found
    parse_retention(KvCacheOptions(prompt_retention=ranges), limits, bad)
    assert [violation.field for violation in bad.found] == ["spec.kv_cache.prompt_retention"]
