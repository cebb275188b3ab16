"""Models whose quantized matrices are held as stored compute what decoded ones compute."""

from functools import cache

import pytest
import torch

from engine_worker.attention.cache import KVCache
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.formats.rounding import rounding_of
from engine_worker.layers.adapters import find_targets
from engine_worker.layers.coded import FEW_ROWS, CodedProduct
from engine_worker.layers.linear import Embedding, Linear, SummedLinear
from engine_worker.layers.shard import UNSHARDED
from engine_worker.runner.coded_weights import find_kernels
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.torch_forward import TorchForward
from tests.engine_worker.formats import checkpoints, gguf_files
from tests.engine_worker.layers.coded_cases import TorchKernels, dense
from tests.engine_worker.models.checkpoints import open_written
from tests.engine_worker.models.loading import Rank, change
from tests.engine_worker.runner.held import BLOCK, CPU, decoded, held, logits

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
ALL = 2 * 7
"""Matrices of two layers."""
FORMATS = {
    "AWQ": f"{ALL - 1} as stored in u4",
    "GPTQ, act-order": f"{ALL - 1} as stored in u4",
    "compressed-tensors, 8 bits": f"{ALL - 1} as stored in i8",
    "compressed-tensors, NVFP4": f"{ALL - 1} as stored in f4e2m1",
    "FP8, large blocks": f"{ALL - 1} as stored in f8e4m3",
    "FP8, blocks": f"{ALL - 1} decoded (groups of 24)",
    "bitsandbytes, nf4": f"{ALL - 1} as stored in nf4",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """`write_pair` of checkpoints or GGUF files. Tests that get the same arguments share the files."""

    @cache
    def write(module, model: str, *args):
        return module.write_pair(tmp_path_factory.mktemp("pair"), model, *args)

    return write


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_logits(pair, name):
    quantized, plain = pair(checkpoints, "qwen3, biased", name)
    kernels = TorchKernels()
    model, summary = held(open_written(quantized), kernels.kernels)
    assert summary == FORMATS[name]
    expected = decoded(open_written(plain))
    for counts in ((1,), (3, 5), (FEW_ROWS + 2,)):
        kernels.launches.clear()
        torch.testing.assert_close(logits(model, *counts), logits(expected, *counts), **CLOSE)
        if "as stored" in summary:
            # One for each of qkv_proj, o_proj, gate_up_proj and down_proj; of the first qkv_proj v_proj is plain.
            assert kernels.launches == ["product" if sum(counts) <= FEW_ROWS else "decode"] * 2 * 4


@pytest.mark.parametrize(("model", "biased"), [("tied", False), ("qwen2", True)])
@torch.inference_mode()
def test_vocabularies_and_parts_of_different_kinds(tmp_path, model, biased):
    types = {"q_proj": "Q4_K", "k_proj": "Q8_0", "v_proj": "Q4_1", "down_proj": "Q6_K", "embed_tokens": "Q4_0"}
    quantized, plain = gguf_files.write_pair(tmp_path, model, types)
    found, _ = held(open_written(quantized), TorchKernels().kernels)
    layer = found.model.layers[0]
    assert (layer.self_attn.qkv_proj.bias is not None) == biased
    expected = decoded(open_written(plain))
    for counts in ((1,), (3, FEW_ROWS)):
        torch.testing.assert_close(logits(found, *counts), logits(expected, *counts), **CLOSE)
    if model == "tied":
        assert found.lm_head._product is found.model.embed_tokens.table.product


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("AWQ", f"{ALL - 1} as stored in u4"),
        ("GPTQ, act-order", f"{ALL - 5} as stored in u4, 4 decoded (its groups are of inputs of several ranks)"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
@torch.inference_mode()
def test_every_rank_computes_its_share(pair, name, summary, rank):
    quantized, plain = pair(checkpoints, "llama", name)
    model, found = held(open_written(quantized), TorchKernels().kernels, Rank(rank))
    assert found == summary
    expected = decoded(open_written(plain), Rank(rank))
    check_layers(model, expected)


@pytest.mark.parametrize("rank", [0, 1])
@torch.inference_mode()
def test_every_rank_has_its_share_of_the_vocabulary(tmp_path, rank):
    """Of an odd number of rows: the last rank's are padded."""
    quantized, _ = gguf_files.write_pair(tmp_path, "tied", {"embed_tokens": "Q4_1"})
    model, _ = held(open_written(quantized), TorchKernels().kernels, Rank(rank))
    check_layers(model, decoded(open_written(quantized), Rank(rank)))


def check_layers(model, expected) -> None:
    """Compare each layer on its own: without the other rank, the whole means nothing."""
    count = 0
    for one, other in pairs(model, expected):
        random = torch.Generator().manual_seed(0)
        if isinstance(one, Embedding):
            tokens = torch.arange(97)
            assert torch.equal(one(tokens.clone()), other(tokens.clone()))
        elif isinstance(one, Linear):
            x = torch.randn(3, other.weight.shape[1], generator=random)
            found, right = (each.share(x) if isinstance(each, SummedLinear) else each(x) for each in (one, other))
            torch.testing.assert_close(found, right, **CLOSE)
            count += 1
    assert count == 2 * 4 + 1


def pairs(one, other):
    yield one, other
    for (_, child), (_, twin) in zip(one.children(), other.children(), strict=True):
        yield from pairs(child, twin)


class WrongKernels(TorchKernels):
    """Its products are wrong for more than one row."""

    def _product(self, x, matrix, bias):
        return super()._product(x, matrix, bias) + float(len(x) > 1)


class CrashingKernels(TorchKernels):
    def _decode(self, matrix, rows, out):
        raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        (WrongKernels, "in a test, the product with codes is off by"),
        (CrashingKernels, "no such instruction"),
    ],
)
@torch.inference_mode()
def test_matrices_whose_kernels_fail_their_test_are_decoded(pair, kernels, reason):
    quantized, plain = pair(checkpoints, "llama", "AWQ")
    model, summary = held(open_written(quantized), kernels().kernels)
    assert summary.startswith(f"{ALL - 1} decoded ({reason}")
    torch.testing.assert_close(logits(model, 3), logits(decoded(open_written(plain)), 3), **CLOSE)


@torch.inference_mode()
def test_an_embedding_and_a_head_that_differ(tmp_path):
    quantized, plain = checkpoints.write_pair(tmp_path, "llama", "AWQ", excluded=())
    for folder in (quantized, plain):
        change(folder, lambda tensors: tensors["lm_head.weight"].mul_(2))
        checkpoints.change_config(folder, {"tie_word_embeddings": True})
    model, _ = held(open_written(quantized), TorchKernels().kernels)
    torch.testing.assert_close(logits(model, 3), logits(decoded(open_written(plain)), 3), **CLOSE)


def test_adapters_are_added_to_the_same_layers(pair):
    quantized, plain = pair(checkpoints, "llama", "AWQ")
    model, _ = held(open_written(quantized), TorchKernels().kernels)
    assert isinstance(model.model.layers[1].self_attn.o_proj._product, CodedProduct)
    assert find_targets(model.model.layers) == find_targets(decoded(open_written(plain)).model.layers)


def test_where_matrices_are_decoded(pair):
    """On a CPU, and without kernels. A checkpoint that is not quantized has none."""
    quantized, plain = (open_written(each) for each in pair(checkpoints, "llama", "AWQ"))
    gpu = torch.device("cuda")
    assert find_kernels(quantized, RunnerConfig("cuda"), CPU) == (None, "")
    assert find_kernels(plain, RunnerConfig("cuda"), gpu) == (None, "")
    assert find_kernels(plain, RunnerConfig("cuda", weights="random"), gpu) == (None, "")
    with pytest.raises(ValueError, match=r"quantize = int8 needs Triton's kernels on a GPU: fused_kernels = false"):
        find_kernels(plain, RunnerConfig("cuda", fused_kernels=False, quantize="int8"), gpu)
    off = find_kernels(quantized, RunnerConfig("cuda", fused_kernels=False), gpu)
    assert off == (None, "decoded: fused_kernels = false")


@pytest.mark.parametrize(("name", "kind"), [("AWQ", "u4"), ("FP8, large blocks", "f8e4m3")])
@torch.inference_mode()
def test_random_matrices(tmp_path, name, kind):
    """Of the checkpoint's format, the same on every rank, and of the size of a model's."""
    checkpoint, _ = (open_written(each) for each in checkpoints.write_pair(tmp_path, "llama", name))
    for file in checkpoint.path.glob("*.safetensors"):
        file.unlink()
    done = []
    config = RunnerConfig("cpu", weights="random")
    model, summary = held(checkpoint, TorchKernels().kernels, UNSHARDED, config, lambda *counts: done.append(counts))
    assert summary == f"{ALL} as stored in {kind}"
    assert logits(model, 5).isfinite().all()
    whole = model.model.layers[1].self_attn.o_proj._product.matrix
    assert 0.1 < dense(whole).std() / model.lm_head.weight.std() < 10
    codes = sum(64 * 96 * 3 + 64 * (2 * 64 + 2 * 32) for _ in range(2)) // (2 if kind == "u4" else 1)
    plain = sum(target.nbytes for target in model.targets().values())
    assert 0 <= done[-1][1] - codes - plain < codes / 10
    rank, _ = held(checkpoint, TorchKernels().kernels, Rank(1), config)
    share = rank.model.layers[1].self_attn.o_proj._product.matrix
    assert torch.equal(dense(share), dense(whole)[:, whole.inputs // 2 :])


@pytest.mark.parametrize(
    ("quantize", "summary"),
    [
        ("int8", f"{ALL + 2} as stored in i8"),
        ("int4", f"{ALL + 2 - 6} as stored in i8, 6 as stored in u4"),
        ("fp8", f"{ALL + 2} as stored in f8e4m3"),
    ],
)
@torch.inference_mode()
def test_plain_matrices_are_rounded_by_the_setting(pair, quantize, summary):
    _, folder = pair(checkpoints, "llama", "AWQ")
    model, found = held(open_written(folder), TorchKernels().kernels, config=RunnerConfig("cpu", quantize=quantize))
    assert found == summary
    expected = decoded(open_written(folder))
    for name, target in expected.targets().items():
        if target.dim() == 2:
            rounding = rounding_of(quantize, name)
            target.copy_(rounding(target).decode())
    torch.testing.assert_close(logits(model, 3), logits(expected, 3), **CLOSE)


@pytest.mark.parametrize(("quantize", "events"), [("int8", []), ("int4", ["weights_rounded_coarsely"])])
@torch.inference_mode()
def test_coarse_rounding_is_reported(pair, quantize, events):
    warnings, config = [], RunnerConfig("cpu", quantize=quantize)
    checkpoint = open_written(pair(checkpoints, "llama", "AWQ")[1])
    held(checkpoint, TorchKernels().kernels, config=config, warn=lambda *warning: warnings.append(warning))
    assert [event for event, _ in warnings] == events


def test_the_setting_is_part_of_the_name_of_the_computation(pair):
    model = decoded(open_written(pair(checkpoints, "llama", "AWQ")[1]))
    heads = model.config.heads
    cache = KVCache(model.config.num_layers, 1, BLOCK, heads.num_kv_heads, heads.head_dim, torch.float32, CPU)
    for quantize, name in (
        ("none", "float32"),
        ("int8", "float32, weights int8"),
        ("int4", "float32, weights int4 in groups of 64"),
    ):
        assert TorchForward(model, cache, ReferenceAttention(heads), CPU, quantize=quantize).dtype == name
