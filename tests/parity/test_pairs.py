"""Any combination of features returns the same results on a busy engine as alone on an idle one.

Results are the tokens, their log-probabilities, the text and the finish reason.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine_worker.guided.guides import Guides
from engine_worker.guided.processes import GuideModel
from sluice import tiny_model
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.engine import GuideLimits, ProcessorNames
from sluice.wire.params import SamplingParams, Speculation, StopParams
from sluice.wire.prompt_logprobs import Row
from tests.engine_worker.guided.tools import prepared
from tests.examples import examples
from tests.fakes import rank_processors
from tests.fakes.drafting import proposing
from tests.parity.draft_models import draft_model
from tests.parity.harness import EngineHarness
from tests.parity.near import check_best, check_ranks
from tests.parity.reading import read
from tests.parity.test_guided import GUIDES

END = 4093
VOCABULARY = 4096
PROCESSORS = ProcessorNames({"shift": f"{rank_processors.__name__}:shift"}, logits_processor_replicate=True)
STOPS = ((), (), ("e", "\n\n"), ("self", "re", "(x"), ("1", "ab", "or "))
ENGINES: dict[str, dict[str, Any]] = {
    "overlap": {"overlap": True},
    "pauses, chunks": {"kv_cache_tokens": 128, "max_batch_size": 16, "max_tokens_per_step": 48, "tokens_per_block": 8},
    "pauses, chunks, overlap": {
        "kv_cache_tokens": 128, "max_batch_size": 16, "max_tokens_per_step": 48, "tokens_per_block": 8, "overlap": True,
    },
    "few at a time, uncached": {"max_batch_size": 3, "block_reuse": False},
    "openvino": {"backend": "openvino"},
    "draft model": {"draft_model": {"noise": 0.3}, "kv_host_memory": 1 << 20, "overlap": True},
    "draft model, pauses, chunks": {
        "draft_model": {"noise": 0.1}, "kv_cache_tokens": 128, "max_batch_size": 16, "max_tokens_per_step": 48,
        "tokens_per_block": 8,
    },
    "two ranks, pauses, chunks, overlap": {
        "tensor_parallel": 2, "kv_cache_tokens": 128, "max_batch_size": 16, "max_tokens_per_step": 48,
        "tokens_per_block": 8, "overlap": True,
    },
    "draft model, openvino": {"backend": "openvino", "draft_model": {"num_layers": 3}},
}  # fmt: skip
"""`draft_model`: see `tests.parity.draft_models`. With one, half of the requests bring no draft tokens."""
COVERED = {
    "overlap", "pauses, chunks", "few at a time, uncached", "draft model", "draft model, pauses, chunks",
    "two ranks, pauses, chunks, overlap", "openvino", "draft model, openvino",
}  # fmt: skip
"""Engines that others of this table or other modules cover almost."""


@pytest.fixture(scope="module")
def guides():
    guides = Guides(GuideModel.of(open_checkpoint(str(tiny_model.path()))), GuideLimits())
    # Otherwise requests would wait for their guides, and which of them share a batch would depend on timing.
    for guide in GUIDES.values():
        assert prepared(guides, guide) is None
    yield guides
    guides.close()


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long) if name in COVERED else name for name in ENGINES]
)
def engine(request, guides, tmp_path_factory) -> Iterator[tuple[str, EngineHarness]]:
    options = dict(ENGINES[request.param])
    if changes := options.get("draft_model"):
        options["draft_model"] = draft_model(tiny_model.path(), tmp_path_factory.mktemp("draft"), **changes)
    harness = EngineHarness(tiny_model.path(), guides=guides, max_draft_batch=64, processors=PROCESSORS, **options)
    yield request.param, harness
    harness.close()
    # The configuration had the intended effects.
    assert harness.engine.stats.accepted_draft_tokens > 20
    if "draft_model" not in options:
        # With a draft model, requests end too soon to compete for memory; see `test_speculation`.
        assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


@pytest.fixture(scope="module")
def alone(guides) -> Callable[[str], EngineHarness]:
    """The idle engine of each backend, without prefix reuse."""
    options = {"guides": guides, "processors": PROCESSORS, "block_reuse": False}
    return cache(lambda backend: EngineHarness(tiny_model.path(), backend=backend, **options))


@st.composite
def features(draw: st.DrawFn) -> dict[str, Any]:
    def maybe(value: Any, default: Any) -> Any:
        return draw(st.sampled_from([default, default, value]))

    max_tokens = draw(st.integers(1, 32))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.4, 1.0])),
        seed=draw(st.integers(0, 999)),
        top_p=maybe(0.9, 1.0),
        top_k=maybe(20, 0),
        repetition_penalty=maybe(1.2, 1.0),
        frequency_penalty=maybe(0.3, 0.0),
        presence_penalty=maybe(0.2, 0.0),
        no_repeat_ngram_size=maybe(2, 0),
        bad_words=maybe(tuple((a, b) for a in range(300, 340) for b in range(300, 340)), ()),
        min_p=maybe(0.02, 0.0),
        bad_token_ids=maybe((64, 300), ()),
        # Rarely, because requests with logits processors do not speculate.
        logits_processors=("shift",) if draw(st.integers(0, 5)) == 5 else (),
        logit_bias=maybe(((5, 2.0), (300, -3.0)), ()),
        logprobs=maybe(2, None),
    )
    stopping = StopParams(
        max_tokens,
        min_tokens=maybe(min(4, max_tokens), 0),
        eos_token_ids=maybe((END,), ()),
        stop_token_ids=maybe(tuple(range(2, 4000, 9)), ()),
    )
    return {
        "sampling": sampling,
        "stopping": stopping,
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "guide": GUIDES[draw(st.sampled_from(sorted(GUIDES)))] if draw(st.booleans()) else None,
        "stop": draw(st.sampled_from(STOPS)),
        "prompt_logprobs": maybe(draw(st.integers(0, 3)), None),
    }


REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "features": features(),
            "prompt": st.tuples(st.integers(0, 9), st.integers(1, 90).map(lambda length: 91 - length)),
            "drafts": st.sampled_from([0, 1, 6]),
            "wrong": st.integers(2, 9),
            "draft_logits": st.sampled_from([None, None, {}, {"threshold": 0.3}]),
            "resume": st.one_of(st.none(), st.integers(0, 40)),
        }
    ),
    min_size=3,
    max_size=6,
)


def outcome(harness: EngineHarness, number: int, n: int) -> list[tuple[Any, ...]]:
    """(tokens, reason, stop token, stop string, fault, text, logprobs) of each sequence."""
    opened, outcomes = harness.receiver.opens[number, 0], []
    for index in range(n):
        tokens, logprobs, text, end = read(opened, index, harness.stream(number, index).rows)
        outcomes.append((tokens, end.reason, end.stop_token, end.stop_string, end.fault, text, logprobs))
    return outcomes


def draft_tokens(drawn: dict[str, Any], expected: list[tuple[Any, ...]]) -> list[int]:
    """The first sequence's output with every `wrong`-th token replaced."""
    tokens = list(expected[0][0])
    tokens[drawn["wrong"] :: drawn["wrong"]] = [7] * len(tokens[drawn["wrong"] :: drawn["wrong"]])
    return tokens


def undisturbed(harness: EngineHarness, spec: dict[str, Any]) -> tuple[list[tuple[Any, ...]], list[Row]]:
    number = harness.send(**spec)
    harness.run()
    return outcome(harness, number, spec["n"]), harness.prompt_logprobs(number)


def disturbed(
    drawn: dict[str, Any], spec: dict[str, Any], expected: list[tuple[Any, ...]], *, has_model: bool
) -> dict[str, Any]:
    """Fields to add to a request that must not change its results: draft tokens, and a state to resume from."""
    # Draft tokens without logits, and the number of draft tokens per step, never change the output.
    tokens = draft_tokens(drawn, expected) if not has_model or drawn["wrong"] % 2 else []
    speculation = spec.get("speculation") or Speculation(0, tuple(tokens))
    fields: dict[str, Any] = {"speculation": replace(speculation, max_draft_tokens=drawn["drafts"])}
    if drawn["resume"] is not None:
        parts = {i: tokens[: (drawn["resume"] + 3 * i) % (len(tokens) + 1)] for i, (tokens, *_) in enumerate(expected)}
        fields["resume"] = {i: tokens for i, tokens in parts.items() if tokens}
        if fields["resume"]:
            fields["prompt_logprobs"] = None
    return fields


def check(
    actual: list[tuple[Any, ...]], expected: list[tuple[Any, ...]], resumed: dict[int, list[int]], accuracy: float
) -> None:
    for i, ((*facts, text, logprobs), (*right, right_text, right_logprobs)) in enumerate(
        zip(actual, expected, strict=True)
    ):
        assert facts == right
        # The caller of a resumed request already has the beginning of the text.
        assert right_text.endswith(text) if i in resumed else text == right_text
        right_logprobs = right_logprobs[len(resumed.get(i, ())) :] if right_logprobs else []
        for logprob, right_logprob in zip(logprobs, right_logprobs, strict=True):
            check_best(logprob.top, right_logprob.top)
        check_ranks([logprob.rank for logprob in logprobs], [logprob.rank for logprob in right_logprobs])
        right_values = [logprob.logprob for logprob in right_logprobs]
        assert [logprob.logprob for logprob in logprobs] == pytest.approx(right_values, abs=accuracy)


def check_prompt(actual: list[Row], expected: list[Row], accuracy: float) -> None:
    check_ranks([rank for _, rank, _ in actual], [rank for _, rank, _ in expected])
    for (logprob, _, best), (right, _, right_best) in zip(actual, expected, strict=True):
        assert logprob == pytest.approx(right, abs=accuracy)
        assert [value for _, value in best] == pytest.approx([value for _, value in right_best], abs=accuracy)


@given(drawn=REQUESTS)
@examples(
    6, phases=(Phase.generate,), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
def test_requests_on_a_busy_engine_return_what_they_return_alone(engine, alone, prompts, drawn):
    name, harness = engine
    idle = alone(ENGINES[name].get("backend", "torch"))
    specs, expected = [], []
    for choices in drawn:
        which, length = choices["prompt"]
        specs.append({"prompt": prompts[20 + which][:length], **choices["features"]})
        expected.append(undisturbed(idle, specs[-1]))
        if choices["draft_logits"] is not None and (tokens := draft_tokens(choices, expected[-1][0])):
            # Draft logits do change the output, so they belong to the undisturbed request too.
            specs[-1]["speculation"] = proposing(tokens, VOCABULARY, length, 0, **choices["draft_logits"])
            expected[-1] = undisturbed(idle, specs[-1])
    has_model = "draft_model" in ENGINES[name]
    accuracy = 1e-3 if "tensor_parallel" in ENGINES[name] else 1e-4
    disturbances = [
        disturbed(choices, spec, right, has_model=has_model)
        for choices, spec, (right, _) in zip(drawn, specs, expected, strict=True)
    ]
    numbers = [harness.send(**(spec | extra)) for spec, extra in zip(specs, disturbances, strict=True)]
    harness.run()
    for number, spec, extra, (right, prompt) in zip(numbers, specs, disturbances, expected, strict=True):
        check(outcome(harness, number, spec["n"]), right, extra.get("resume", {}), accuracy)
        check_prompt(harness.prompt_logprobs(number), [] if extra.get("resume") else prompt, accuracy)
