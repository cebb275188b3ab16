import json
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from engine_worker.layers.shard import UNSHARDED, Cut, Span
from engine_worker.openvino.load import load_openvino
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.load import load_runner
from engine_worker.runner.weights import CheckpointWeights, fill_weights, random_weights
from engine_worker.step import Draw, Slice, Step
from sluice.checkpoint.errors import CheckpointError
from sluice.wire.params import SamplingParams
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint
from tests.engine_worker.models.loading import Rank, change, empty_model

LLAMA = CONFIGS["llama"]
TIED = CONFIGS["qwen3, tied"]


def targets(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}


def load_weights(*arguments: object) -> None:
    with CheckpointWeights(*arguments) as weights:
        weights.fill()


def first_token(folder, *, load=load_runner, **options) -> object:
    config = RunnerConfig("cpu", kv_cache_tokens=64, threads=1, **options)
    runner = load(open_written(folder), config, lambda *_: None)
    draw = Draw(SamplingParams(temperature=0.0, logprobs=3), 0, 0)
    return runner.run(Step((Slice([5, 6, 7], 0, [0], (draw,)),)))[0]


def test_sharded_equals_single(tmp_path):
    write_checkpoint(tmp_path / "single", LLAMA)
    write_checkpoint(tmp_path / "sharded", LLAMA, shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert first_token(tmp_path / "single") == first_token(tmp_path / "sharded")


def test_progress_ends_at_the_total(tmp_path):
    write_checkpoint(tmp_path, LLAMA)
    calls = []
    load_runner(open_written(tmp_path), RunnerConfig("cpu", kv_cache_tokens=64), lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert len(calls) > 10
    assert calls[-1] == (calls[0][1], calls[0][1])


def test_derived_tensors_are_ignored(tmp_path):
    write_checkpoint(tmp_path, TIED)
    expected = first_token(tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    change(tmp_path, add)
    assert first_token(tmp_path) == expected


def own_head(tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()


def only_head(tensors) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


@pytest.mark.parametrize("edit", [own_head, only_head])
@pytest.mark.parametrize("shard", [UNSHARDED, *map(Rank, range(2))], ids=["whole", "rank 0", "rank 1"])
def test_a_tied_checkpoint_is_read_as_by_transformers(tmp_path, edit, shard):
    """`own_head`: files whose head differs from the embedding. transformers' logits are the reference."""
    write_checkpoint(tmp_path, TIED)
    change(tmp_path, edit)
    checkpoint = open_written(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        model = empty_model(checkpoint, shard)
        fill_weights(model, checkpoint, RunnerConfig("cpu"), lambda *_: None)
    for name, weight in (("embed_tokens", model.model.embed_tokens.weight), ("lm_head", model.lm_head.weight)):
        whole = (reference.model.embed_tokens if name == "embed_tokens" else reference.lm_head).weight
        part = shard.padded_span(len(whole))
        assert torch.equal(weight[: part.filled], whole[part.end - part.filled : part.end]), name


@pytest.mark.parametrize("load", [load_runner, partial(load_openvino, warn=lambda *_: None)])
def test_the_head_of_a_tied_checkpoint_determines_the_tokens(tmp_path, load):
    for name, tied in (("tied", True), ("untied", False)):
        write_checkpoint(tmp_path / name, TIED)
        change(tmp_path / name, own_head)
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": tied}))
    tied, untied = (first_token(tmp_path / name, load=load) for name in ("tied", "untied"))
    assert tied == untied


def test_missing_and_unexpected_tensors_are_named(tmp_path):
    write_checkpoint(tmp_path, LLAMA)

    def swap(tensors):
        tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.1.self_attn.k_proj.weight").clone()

    change(tmp_path, swap)
    with pytest.raises(CheckpointError) as caught:
        first_token(tmp_path)
    assert "missing: model.layers.1.self_attn.k_proj.weight;" in str(caught.value)
    assert "unexpected: model.layers.0.mlp.extra.weight" in str(caught.value)


def test_an_untied_head_is_required(tmp_path):
    write_checkpoint(tmp_path, LLAMA)
    change(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        first_token(tmp_path)


def test_long_lists_of_names_are_cut(tmp_path):
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w04 and 95 more; unexpected: other"):
        load_weights(tmp_path, targets(**{f"w{i:02}": (1,) for i in range(100)}), lambda *_: None)


def test_shapes_and_types_must_match(tmp_path):
    save_file({"w": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w has shape \[2, 3\], the model needs \[3, 2\]"):
        load_weights(tmp_path, targets(w=(3, 2)), lambda *_: None)
    save_file({"w": torch.zeros(2, 3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="quantized"):
        load_weights(tmp_path, targets(w=(2, 3)), lambda *_: None)


def test_broken_and_missing_files(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_weights(tmp_path, {}, lambda *_: None)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not an index of weight files"):
        load_weights(tmp_path, {}, lambda *_: None)
    index.write_text(json.dumps({"weight_map": {"w": "part-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"has 0 of the 1 weight files .*part-1\.safetensors"):
        load_weights(tmp_path, {}, lambda *_: None)
    (tmp_path / "part-1.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(CheckpointError, match="is broken"):
        load_weights(tmp_path, {}, lambda *_: None)


def test_random_weights_follow_their_seed(tmp_path):
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, LLAMA)
        (tmp_path / name / "model.safetensors").unlink()
    first, same, different = (
        first_token(tmp_path / name, weights="random", weights_seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("a", 2))
    )
    assert first == same != different
    filled = targets(w=(200, 50), norm=(9,)) | {"x.bias": torch.full((4,), torch.nan)}
    random_weights(filled, 3, 0.02, lambda *_: None)
    assert filled["w"].std().item() == pytest.approx(0.02, rel=0.1)
    assert filled["norm"].unique().item() == 1.0
    assert filled["x.bias"].unique().item() == 0.0


@pytest.mark.parametrize("config", ["qwen3, tied", "llama, biased, linear rope", "qwen3 moe, half sparse, windowed"])
@pytest.mark.parametrize("source", ["files", "random"])
def test_each_rank_loads_its_shard(tmp_path, config, source):
    """Together the ranks have the tensors of a single rank; each reports the whole checkpoint as done."""
    write_checkpoint(tmp_path, CONFIGS[config])
    checkpoint = open_written(tmp_path)
    loaded, progress = [], []
    for shard in (UNSHARDED, Rank(0), Rank(1)):
        model = empty_model(checkpoint, shard)
        cuts = model.cuts()
        if source == "files":
            load_weights(tmp_path, model.targets(), lambda *done: progress.append(done), cuts)
            assert progress[-1][0] == progress[-1][1] == (tmp_path / "model.safetensors").stat().st_size
        else:
            random_weights(model.targets(), 5, 0.02, lambda *_: None, cuts)
        loaded.append((model.targets(), cuts))
    (whole, _), *ranks = loaded
    for name, tensor in whole.items():
        together = torch.full_like(tensor, torch.nan)
        for targets, cuts in ranks:
            dim, part = cuts.get(name, Cut(0, Span(0, len(tensor), len(tensor))))
            assert targets[name].shape[dim] == part.filled
            together.narrow(dim, part.end - part.filled, part.filled).copy_(targets[name])
        assert torch.equal(together, tensor), name
