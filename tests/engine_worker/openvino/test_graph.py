"""Logits of the graph against transformers on the same checkpoint. A new version of OpenVINO may break these tests."""

import pytest
import torch

from engine_worker.openvino.compiled import fused_rotations
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.engine_worker.models.logits import logprobs_of
from tests.engine_worker.openvino.loaded import load

LENGTHS = (1, 2, 15, 16, 33, 70, 300)


@pytest.fixture(scope="module", params=[name for name in CONFIGS if "moe" not in name])
def folder_and_model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, write_checkpoint(folder, CONFIGS[request.param])


@pytest.mark.quick(4)
def test_logits_equal_transformers_and_rotations_are_fused(folder_and_model):
    folder, model = folder_and_model
    runner = load(folder)
    assert "it agrees with torch" in runner.choices["backend_reason"]
    assert fused_rotations(runner._forward.rank.model) == 2 * model.config.num_hidden_layers
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(97, (length,), generator=random).tolist() for length in LENGTHS]
    for prompt, logprobs in zip(prompts, logprobs_of(runner, prompts), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(dim=-1)
        torch.testing.assert_close(logprobs, expected, atol=2e-4, rtol=1e-4)
