"""Steps that are launched before earlier ones are collected."""

import pytest

from engine_worker.runner import compute
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from engine_worker.sampling import choose, sampler
from engine_worker.sampling.choose import TORCH, SamplingKernels
from engine_worker.sampling.filters import torch_thresholds
from engine_worker.sampling.logit_rules import build_logit_rules
from engine_worker.step import Draw, Slice, Step
from sluice.wire.params import SamplingParams
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
PENALIZED = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.7, presence_penalty=1.5)
SAMPLINGS = [SamplingParams(temperature=0.0), PENALIZED, SamplingParams(seed=4, top_p=0.9, logprobs=1)]
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return folder


def load(folder, overlap: bool):
    config = RunnerConfig("cpu", kv_cache_tokens=256, threads=1, overlap=overlap)
    return load_runner(open_written(folder), config, lambda *_: None)


def one(i: int, output: list[int], step: int, follows: int | None) -> Slice:
    """Sequence i's slice in a step, given its known tokens."""
    prompt, known = PROMPTS[i], len(output)
    # New rules per step behave like those that are kept for the sequence.
    (rules,) = build_logit_rules(SAMPLINGS[i], prompt)
    draws = (Draw(SAMPLINGS[i], i, step, output, rules),)
    if step == 0:
        return Slice(prompt, 0, [i], draws)
    tokens = (0,) if follows is not None else (output[known - 1],)
    return Slice(tokens, len(prompt) + step - 1, [i], draws, follows)


def collected_each(runner) -> list[list]:
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    results = []
    for step in range(STEPS):
        drawn = runner.launch(Step(tuple(one(i, outputs[i], step, None) for i in range(3)))).collect()
        for output, result in zip(outputs, drawn, strict=True):
            output.append(result.token)
        results.append(drawn)
    return results


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("behind", [1, STEPS])
def test_a_slice_that_follows_a_draw_gets_its_token(folder, overlap, behind):
    """Results are collected `behind` steps later; the order of the sequences changes from step to step."""
    expected = collected_each(load(folder, overlap=False))
    runner = load(folder, overlap)
    outputs: list[list[int]] = [[] for _ in PROMPTS]
    launched, results, before = [], [], [0, 1, 2]
    for step in range(STEPS):
        order = [(i + step) % 3 for i in range(3)]
        if step < 2 or behind == 1:
            slices = [one(i, outputs[i], step, before.index(i) if step else None) for i in order]
        else:
            # Penalties need all tokens but the followed one, so skip the sequence that has penalties.
            order = [0, 2]
            slices = [one(i, outputs[i], step, before.index(i)) for i in order]
        launched.append((order, runner.launch(Step(tuple(slices)))))
        before = order
        while len(launched) - len(results) > behind:
            results.append(launched[len(results)][1].collect())
            for i, result in zip(launched[len(results) - 1][0], results[-1], strict=True):
                outputs[i].append(result.token)
    results += [step.collect() for _, step in launched[len(results) :]]
    for (order, _), tokens, right in zip(launched, results, expected, strict=True):
        assert tokens == [right[i] for i in order]


def test_tokens_appended_after_the_launch_have_no_effect(folder):
    expected = collected_each(load(folder, overlap=False))
    runner = load(folder, overlap=True)
    output: list[int] = []
    first = runner.launch(Step((one(1, output, 0, None),)))
    second = runner.launch(Step((one(1, output, 1, 0),)))
    output.append(first.collect()[0].token)
    third = runner.launch(Step((one(1, output, 2, 0),)))
    output.append(second.collect()[0].token)
    assert [*output, third.collect()[0].token] == [step[1].token for step in expected[:3]]


@pytest.mark.parametrize("overlap", [False, True])
def test_other_sequences_continue_after_a_failed_step(folder, overlap):
    expected = collected_each(load(folder, overlap=False))
    runner = load(folder, overlap)
    model = runner._forward.model
    first = runner.launch(Step((one(0, [], 0, None),)))

    def fail(*_):
        runner._forward.model = model
        raise RuntimeError("out of memory")

    first.collect()
    runner._forward.model = fail
    failed = runner.launch(Step((one(0, [], 1, 0),)))
    dependent = runner.launch(Step((one(0, [], 2, 0), one(2, [], 0, None))))
    with pytest.raises(RuntimeError, match="out of memory"):
        failed.collect()
    assert dependent.collect()[1] == expected[0][2]


def test_a_step_that_cannot_be_built_fails_alone(folder):
    expected = collected_each(load(folder, overlap=False))
    runner = load(folder, overlap=True)
    runner.launch(Step((one(0, [], 0, None),)))
    with pytest.raises(ValueError, match="too short"):
        runner.launch(Step((Slice([1], 500, [0], ()),)))
    after = runner.launch(Step((one(0, [], 1, 7), one(2, [], 0, None))))
    assert after.collect()[1] == expected[0][2]


def test_a_step_with_too_few_candidates_is_sampled_again(folder, monkeypatch):
    """As on CUDA, the first pass does not wait for the device. A kernel that reads all scores needs one pass."""
    monkeypatch.setattr(choose, "CANDIDATES", 16)
    wide = SamplingParams(seed=4, top_p=0.999, temperature=5.0, logprobs=1)
    first = Step((Slice(PROMPTS[0], 0, [0], (Draw(wide, 0, 0),)),))
    second = Step((Slice([0], 4, [0], (Draw(wide, 0, 1),), 0),))

    def run(waits: bool, kernels: SamplingKernels = TORCH) -> list:
        runner = load(folder, overlap=True)
        runner._computer._widen, runner._computer._kernels = waits, kernels
        launched = [runner.launch(first), runner.launch(second)]
        return [step.collect() for step in launched]

    passes = []
    original = sampler.sample
    monkeypatch.setattr(compute, "sample", lambda *a, **o: passes.append(o.get("widen", True)) or original(*a, **o))
    expected = run(waits=True)
    assert run(waits=False) == expected
    assert passes == [True, True, False, True, False, True]
    passes.clear()
    assert run(waits=False, kernels=TORCH._replace(thresholds=torch_thresholds)) == expected
    assert passes == [False, False]
