"""Logits against transformers on the same checkpoint."""

import pytest
import torch

from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint
from tests.engine_worker.models.logits import logprobs_of

LENGTHS = (1, 2, 15, 16, 33, 70, 300)


@pytest.fixture(scope="module", params=CONFIGS)
def folder_and_model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, CONFIGS[request.param])


@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_logits_equal_transformers(folder_and_model, attention):
    folder, model = folder_and_model
    runner = load_runner(
        open_written(folder), RunnerConfig("cpu", attention=attention, kv_cache_tokens=1024, threads=1), lambda *_: None
    )
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(97, (length,), generator=random).tolist() for length in LENGTHS]
    for prompt, logprobs in zip(prompts, logprobs_of(runner, prompts), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
        torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=1e-4)


def test_half_precision_stays_close(folder_and_model):
    folder, model = folder_and_model
    config = RunnerConfig("cpu", dtype="bfloat16", attention="reference", kv_cache_tokens=1024, threads=1)
    runner = load_runner(open_written(folder), config, lambda *_: None)
    prompt = list(range(40))
    with torch.inference_mode():
        exact = model(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
        half = model.bfloat16()(torch.tensor([prompt])).logits[0, -1].float().log_softmax(dim=-1)
        model.float()
    logprobs = logprobs_of(runner, [prompt])[0]
    assert (logprobs - exact).abs().mean() < 2 * (half - exact).abs().mean() + 0.02
