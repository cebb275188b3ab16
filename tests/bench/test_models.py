import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bench.harness.models import TINY, write_rounded, write_shuffled
from engine_worker.formats.rounding import int8
from sluice.checkpoint.weight_files import SINGLE
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint

TOKENS = torch.arange(7, 40).unsqueeze(0)


@pytest.mark.parametrize("family", ["tiny", "llama"])
@torch.inference_mode()
def test_a_shuffled_model_computes_the_same(tmp_path, family):
    source = TINY
    if family != "tiny":
        source = tmp_path / family
        source.mkdir()
        write_checkpoint(source, CONFIGS[family])
    shuffled = write_shuffled(source, tmp_path / "shuffled")
    expected, found = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
        for folder in (source, shuffled)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    before, after = (load_file(folder / SINGLE) for folder in (source, shuffled))
    alike = [name for name in before if before[name].dim() == 2 and torch.equal(before[name].float(), after[name])]
    assert not alike


def test_rounded_weights_are_those_of_the_setting(tmp_path):
    before, after = (load_file(folder / SINGLE) for folder in (TINY, write_rounded(TINY, tmp_path / "r", "int4")))
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(after[name], int8(before[name].float()).decode())
    name = "model.norm.weight"
    assert torch.equal(after[name], before[name].float())
