"""Logits processors: their arguments, and what happens to other sequences if one misbehaves."""

import math

import pytest
import torch
from msgspec.structs import replace

from engine_worker.sampling.logit_rules import build_logit_rules
from engine_worker.sampling.processors import BATCHED, Processing, Processors, find_processors
from engine_worker.sampling.sampler import SamplingPlan, sample
from engine_worker.step import Draw
from sluice.settings.engine import ProcessorNames
from sluice.wire.errors import ErrorCode
from sluice.wire.params import SamplingParams
from tests.engine_worker.sampling.processor_tools import VOCAB, greedy, run
from tests.fakes.engine import spec_of


def choosing(token):
    """A processor that allows one token, and a record of its calls."""
    calls = []

    def processor(request_id, scores, token_ids, stream, client_id):
        assert scores.shape == (1, 1, VOCAB)
        calls.append((request_id, [list(ids) for ids in token_ids], stream, client_id))
        scores[0, 0, torch.arange(VOCAB) != token] = -math.inf

    return processor, calls


def test_a_processor_gets_all_tokens_and_changes_only_its_sequence(logits):
    processor, calls = choosing(9)
    draws = [*greedy(), *greedy(["nine"], output=[3, 4]), *greedy()]
    results = run(logits, draws, [0, 1, 2], Processors({"nine": processor}), {1: 2}, before=[5, 6, 8])
    assert [each.token for each in results] == [logits[0].argmax(), 9, logits[2].argmax()]
    assert calls == [("job", [[1, 2, 3, 4, 8]], None, 7)]
    # The step that sampled 8 has failed: that token never became part of the output.
    run(logits, draws, [0, 1, 2], Processors({"nine": processor}))
    assert calls[1] == ("job", [[1, 2, 3, 4]], None, 7)


def test_sequences_that_share_a_row_get_separate_copies(logits):
    def by_name(request_id, scores, *_):
        scores[0, 0] = -math.inf
        scores[0, 0, int(request_id[-1])] = 0.0

    results = run(logits, greedy(["name"], n=3), [1, 1, 1], Processors({"name": by_name}))
    assert [each.token for each in results] == [0, 1, 2]


def test_processors_run_in_the_order_of_the_request_before_other_edits(logits):
    def add(request_id, scores, *_):
        scores += 1.0

    def double(request_id, scores, *_):
        scores *= 2.0

    def record(request_id, scores, *_):
        seen.append(scores[0, 0].clone())

    seen: list[torch.Tensor] = []
    processors = Processors({"add": add, "double": double, "record": record})
    banned = int(logits[0].argmax())
    draws = [
        *greedy(["add", "double", "record"], bad_token_ids=(banned,)),
        *greedy(["double", "add", "record"], logit_bias=((3, 1000.0),), logprobs=0),
    ]
    results = run(logits, draws, [0, 1], processors)
    torch.testing.assert_close(seen[0], (logits[0] + 1) * 2)
    torch.testing.assert_close(seen[1], logits[1] * 2 + 1)
    assert results[0].token == logits[0].topk(2).indices[1]
    assert results[1].token == 3
    # Logprobs of the model's logits, before the processors.
    assert results[1].logprob.logprob == pytest.approx(logits[1].log_softmax(0)[3].item(), abs=1e-5)


def test_the_batched_processor_is_called_once_per_index(logits):
    calls = []

    def batched(ids, scores, token_ids, stream, client_ids):
        calls.append((ids, [list(each[0]) for each in token_ids], stream, client_ids))
        for each in scores:
            each[0, 0] = -math.inf
            each[0, 0, 5] = 0.0

    processor, _ = choosing(9)
    draws = [*greedy([BATCHED]), *greedy(), *greedy([BATCHED], output=[3]), *greedy(["nine", BATCHED])]
    results = run(logits, draws, [0, 1, 2, 3], Processors({"nine": processor}, batched))
    assert [each.token for each in results] == [5, int(logits[1].argmax()), 5, 5]
    assert calls == [(["job"] * 2, [[1, 2], [1, 2, 3]], None, [7] * 2), (["job"], [[1, 2]], None, [7])]


def test_a_processor_that_raises_ends_only_its_sequence(logits):
    def broken(*_):
        raise KeyError("a secret")

    warnings = []
    processors = Processors({"broken": broken}, broken, lambda event, reason: warnings.append((event, reason)))
    draws = [*greedy(["broken", "broken"]), *greedy(), *greedy([BATCHED])]
    results = run(logits, draws, [0, 1, 2], processors)
    assert [each.fault and each.fault.error_code for each in results] == [
        ErrorCode.PROCESSOR_FAILED,
        None,
        ErrorCode.PROCESSOR_FAILED,
    ]
    assert results[0].fault.message == "the logits processor 'broken' raised KeyError"
    assert results[1].token == logits[1].argmax()
    assert warnings == [
        ("logits_processor_failed", f"{name} raised KeyError: 'a secret'") for name in ("broken", BATCHED)
    ]


class MuteError(Exception):
    def __str__(self) -> str:
        raise ValueError("no message")


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), MuteError()])
def test_the_step_continues_after_any_exception(logits, error):
    def broken(*_):
        raise error

    warnings = []
    processors = Processors({"broken": broken}, broken, lambda _, reason: warnings.append(reason))
    results = run(logits, [*greedy(["broken"]), *greedy(), *greedy([BATCHED])], [0, 1, 2], processors)
    assert [each.fault and each.fault.error_code for each in results] == [
        ErrorCode.PROCESSOR_FAILED,
        None,
        ErrorCode.PROCESSOR_FAILED,
    ]
    assert all(type(error).__name__ in warning for warning in warnings)


def test_sequences_that_ended_earlier_keep_no_tokens():
    spec = replace(spec_of([1, 2], n=3), sampling=SamplingParams(logits_processors=("p",)), ended=(0, 2))
    assert [each and each.tokens for each in Processing.of(spec)] == [None, [1, 2], None]


def test_a_processor_that_bans_all_tokens_or_writes_nan_ends_only_its_sequence(logits):
    def nothing(request_id, scores, *_):
        scores.fill_(-math.inf)

    def nan(request_id, scores, *_):
        scores[0, 0, 3] = math.nan

    def inf(request_id, scores, *_):
        scores[0, 0, 3] = math.inf

    draws = [*greedy(["nothing"]), *greedy(), *greedy(["nan"]), *greedy(["inf"])]
    results = run(logits, draws, [0, 1, 2, 3], Processors({"nothing": nothing, "nan": nan, "inf": inf}))
    assert [each.fault and each.fault.error_code for each in results] == [
        ErrorCode.NOTHING_TO_SAMPLE,
        None,
        ErrorCode.NOTHING_TO_SAMPLE,
        ErrorCode.NOTHING_TO_SAMPLE,
    ]


def test_a_processor_that_keeps_or_changes_its_arguments(logits):
    kept = []

    def rude(request_id, scores, token_ids, *_):
        kept.append(scores)
        token_ids[0].clear()
        token_ids.clear()

    draws = [*greedy(["rude"], output=[3, 4], repetition_penalty=1.5), *greedy(output=[3, 4], repetition_penalty=1.5)]
    same = logits[:1].repeat(2, 1)
    before = same.clone()
    for _ in range(3):
        results = run(same, draws, [0, 1], Processors({"rude": rude}), {0: 0, 1: 0}, before=[6])
        assert results[0].token == results[1].token
        kept[-1].fill_(math.nan)
    assert torch.equal(same, before)


def test_sampling_again_uses_the_processed_logits(logits):
    """On a GPU, a step with too few candidates is sampled again without calling the processors again."""
    size = 1000
    flat = torch.zeros(1, size)

    def tilt(request_id, scores, *_):
        calls.append(request_id)
        scores[0, 0] = torch.arange(size) / size

    calls: list[str] = []
    params = SamplingParams(top_p=0.9, seed=3, logits_processors=("tilt",))
    spec = replace(spec_of([1, 2]), sampling=params)
    (rules,) = build_logit_rules(params, spec.prompt, Processing.of(spec))
    plan = SamplingPlan.of([Draw(params, 0, 0, [], rules)], [0], *flat.shape, {})
    applied = plan.run_rules(flat, None, Processors({"tilt": tilt}))
    first = sample(flat, plan, applied, widen=False)
    assert first.short is not None
    assert first.short
    second = sample(flat, plan, applied)
    assert len(calls) == 1
    expected = sample(
        torch.arange(size)[None] / size,
        SamplingPlan.of([Draw(replace(params, logits_processors=()), 0, 0, [])], [0], 1, size, {}),
    )
    assert second.tokens.tolist() == expected.tokens.tolist()


def test_processors_are_imported_by_the_names_in_the_settings():
    processors = find_processors(ProcessorNames({"floor": "math:floor"}, "math:ceil"), lambda *_: None)
    assert (processors.named, processors.batched) == ({"floor": math.floor}, math.ceil)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (ProcessorNames({"x": "math:missing"}), "logits_processors: x: 'math:missing' cannot be used: AttributeError"),
        (ProcessorNames({"x": "math:pi"}), "logits_processors: x: 'math:pi' cannot be used: it is not callable"),
        (ProcessorNames({}, "no_such_module:f"), "logits_processor_batched: .* ModuleNotFoundError"),
    ],
)
def test_a_processor_that_cannot_be_used_is_named(names, reason):
    with pytest.raises(ValueError, match=reason):
        find_processors(names, lambda *_: None)
