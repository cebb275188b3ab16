"""Strategies for the rules of the engine's state machine: engines and requests."""

from hypothesis import strategies as st

from sluice.wire.params import BeamSearchParams, RangeRetention, RetentionParams
from sluice.wire.tables import NO_TABLES, PromptTables, Table
from sluice.wire.tensors import NO_TENSORS, TensorParams
from tests.fakes.adapters import adapter
from tests.fakes.scripted_tokens import HIDDEN_SIZE, VOCAB

BASES = [[(7 * i + 31 * base) % VOCAB for i in range(40)] for base in range(5)]
"""Prompts begin with a part of one of these, so that many share a prefix."""

LANES = ["mem://a", "mem://b"]
"""Addresses of the detokenizers."""

OUTPUT_LOGITS, HIDDEN_STATES = "generation_logits", "hidden_states"
TENSORS = [
    TensorParams(output=(OUTPUT_LOGITS,)),
    TensorParams(("context_logits",), (OUTPUT_LOGITS, HIDDEN_STATES)),
    TensorParams((HIDDEN_STATES, "context_logits"), (HIDDEN_STATES,)),
    TensorParams(("context_logits",)),
]

ADAPTERS = [adapter(name) for name in "abc"]
ADAPTER_PAGES = {ADAPTERS[0].version: 1, ADAPTERS[1].version: 2, ADAPTERS[2].version: 2}
"""Pages that each adapter occupies, by version."""

TABLES = [
    PromptTables(tuple(Table.of(len(rows) // 4, HIDDEN_SIZE, "float16", rows) for rows in tables))
    for tables in ([b"same" * 5], [b"same" * 4 + b"last"], [b"same" * 2, b"same" * 3], [b"more" * 2, b"same" * 3])
]

RANDOM_CHOICES = st.randoms(use_true_random=False)

RETENTION_SECONDS = st.sampled_from([None, None, 0.02, 0.2, 2.0])


@st.composite
def retentions(draw: st.DrawFn) -> RetentionParams:
    edges = sorted(draw(st.lists(st.integers(0, 48), max_size=6, unique=True)))
    return RetentionParams(
        tuple(
            RangeRetention(start, end, draw(st.integers(0, 100)), draw(RETENTION_SECONDS))
            for start, end in zip(edges[::2], edges[1::2], strict=False)
        ),
        draw(st.sampled_from([35, 0, 50, 100])),
        draw(RETENTION_SECONDS),
    )


ENGINES = {
    "tokens": st.sampled_from([60, 48, 80, 36, 120]),
    "tokens_per_block": st.sampled_from([1, 2, 3, 4, 5]),
    "host": st.sampled_from([1, 0, 3, 0]),
    "window": st.sampled_from([None, None, 2, 5, 9, 16, 30]),
    "batch": st.sampled_from([6, 4, 3, 2, 1]),
    "budget": st.sampled_from([6, 9, 16, 40]),
    "chunked": st.sampled_from([True, True, False]),
    "reuse": st.sampled_from([True, True, True, False]),
    "policy": st.sampled_from(["max_utilization", "max_utilization", "guaranteed_no_evict", "static_batch"]),
    "chunking": st.sampled_from(["first_come_first_served", "equal_progress"]),
    "aging": st.sampled_from([0.0, 1.0]),
    "overlap": st.booleans(),
    "draft_batch": st.sampled_from([8, 2, 0]),
    "pages": st.sampled_from([2, 3, 5, 2]),
    "draft_context": st.sampled_from([None, 1000, 30]),
    "recompute": st.sampled_from(["together", "one by one", "fast"]),
}
"""Arguments of `EngineMachine.start`."""

REQUESTS = {
    "base": st.sampled_from(BASES),
    "shared": st.sampled_from([12, 20, 8, 5, 40, 0]),
    "suffix": st.lists(st.integers(0, 96), max_size=8),
    "max_tokens": st.sampled_from([17, 30, 9, 3, 1]),
    "n": st.sampled_from([1, 1, 1, 2, 3, 9]),
    "priority": st.integers(1, 3),
    "salt": st.sampled_from(["", "", "x"]),
    "retention": st.one_of(st.just(RetentionParams()), retentions()),
    "ends": st.one_of(st.just(()), st.lists(st.integers(0, 96), max_size=8).map(tuple)),
    "min_tokens": st.integers(0, 4),
    "hands_over": st.sampled_from([False, False, False, True]),
    "time_limit": st.sampled_from([None, None, None, 0.0, 0.05, 0.3]),
    "lane": st.sampled_from(LANES),
    "copies": st.sampled_from([2, 1, 3, 6]),
    "resume": st.one_of(st.none(), st.none(), RANDOM_CHOICES),
    "drafts": st.sampled_from([0, 4, 1, 9]),
    "wrong_every": st.integers(0, 7),
    "with_logits": st.sampled_from([False, False, True]),
    "threshold": st.sampled_from([None, 0.5, 1.0]),
    "beams": st.sampled_from([None, None, BeamSearchParams(3), BeamSearchParams(6, 0.5, exhaustive=True)]),
    "prompt_logprobs": st.sampled_from([None, None, 0, 2]),
    "tensors": st.sampled_from([NO_TENSORS, NO_TENSORS, NO_TENSORS, *TENSORS]),
    "adapter": st.sampled_from([None, None, *ADAPTERS]),
    "tables": st.sampled_from([NO_TABLES, NO_TABLES, *TABLES]),
}
"""Arguments of `EngineMachine.submit`."""
