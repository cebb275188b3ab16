"""GGUF files, beside what the format's own library reads."""

import gguf
import numpy as np
import pytest
import torch

from engine_worker.formats import gguf as gguf_file
from engine_worker.formats.ggml import READERS
from engine_worker.formats.gguf import BLOCKS
from engine_worker.formats.source import Files, find_weights
from engine_worker.formats.weight import Place, Weight
from engine_worker.layers.shard import UNSHARDED
from sluice.checkpoint import gguf as gguf_header
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.gguf import TYPES, read_gguf
from sluice.checkpoint.weight_files import GGUF, check_weight_files
from tests.engine_worker.formats.checkpoints import change_config
from tests.engine_worker.formats.gguf_files import KINDS, MODELS, QUANTIZED, random_blocks, write_pair
from tests.engine_worker.formats.test_checkpoints import first_token, weights
from tests.engine_worker.models.checkpoints import open_written
from tests.engine_worker.models.loading import Rank

ROWS, COLUMNS = 24, 512
MIXED = {
    "q_proj": "Q4_K",
    "k_proj": "Q6_K",
    "o_proj": "Q5_0",
    "down_proj": "Q5_K",
    "up_proj": "Q4_1",
    "lm_head": "Q8_0",
}
CLOSE = {"atol": 1e-6, "rtol": 1e-5}


def stored(kind: str, raw: np.ndarray):
    block = next(each for each in TYPES.values() if each.name == kind)
    return READERS[kind](torch.from_numpy(raw).view(ROWS, COLUMNS // block.width, block.num_bytes))


def test_the_types_that_are_accepted_are_those_that_are_read():
    assert {kind.name for kind in TYPES.values()} == {*READERS, "F32", "F16", "BF16"}
    for number, kind in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[KINDS(number)] == (kind.width, kind.num_bytes)
        assert KINDS(number).name == kind.name


@pytest.mark.parametrize("kind", QUANTIZED)
def test_blocks_mean_what_the_library_reads(kind):
    raw = random_blocks(kind, ROWS, COLUMNS)
    expected = torch.from_numpy(gguf.dequantize(raw, KINDS[kind]))
    torch.testing.assert_close(stored(kind, raw).decode(), expected, **CLOSE)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
def test_blocks_whose_values_are_all_the_same(kind):
    raw = random_blocks(kind, ROWS, COLUMNS)
    width, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    raw.reshape(ROWS, COLUMNS // width, size)[:, 0, :2] = 0
    expected = torch.from_numpy(gguf.dequantize(raw, KINDS[kind]))
    torch.testing.assert_close(stored(kind, raw).decode(), expected, **CLOSE)


@pytest.mark.parametrize("model", MODELS)
def test_every_rank_has_its_share_of_the_values(tmp_path, model):
    quantized, dense = write_pair(tmp_path, model, MIXED)
    for shard in (UNSHARDED, Rank(0), Rank(1)):
        expected = weights(dense, shard)
        for target, weight in weights(quantized, shard).items():
            torch.testing.assert_close(weight, expected[target], **CLOSE)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_plain_matrices(tmp_path, kind):
    quantized, dense = write_pair(tmp_path, "llama", {}, kind)
    expected = weights(dense, UNSHARDED)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(quantized, UNSHARDED).items())


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_the_tokens_are_those_of_the_dense_checkpoint(tmp_path, model):
    quantized, dense = write_pair(tmp_path, model, {**MIXED, "embed_tokens": "Q8_0"})
    expected = first_token(dense, "torch")
    for backend, activations, tolerance in (("torch", True, 1e-4), ("openvino", False, 1e-4), ("openvino", True, 0.1)):
        found = first_token(quantized, backend, quantized_activations=activations)
        assert found.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=tolerance)
        assert found.token == expected.token


@pytest.mark.parametrize("kind", QUANTIZED)
def test_an_embedding_that_is_also_the_head(tmp_path, kind):
    quantized, dense = write_pair(tmp_path, "tied", {"embed_tokens": kind})
    expected, found = first_token(dense, "torch"), first_token(quantized, "openvino", quantized_activations=False)
    assert found.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=1e-4)
    assert found.token == expected.token


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_the_header_is_parsed_once(tmp_path, monkeypatch, backend):
    parsed = []

    def count(file):
        parsed.append(file)
        return read_gguf(file)

    quantized, _ = write_pair(tmp_path, "tied", {"proj": "Q8_0", "embed_tokens": "Q8_0"})
    monkeypatch.setattr(gguf_header, "read_gguf", count)
    check_weight_files(open_written(quantized).path)
    first_token(quantized, backend)
    assert len(parsed) == 1
    # Another file in its place is another header.
    (quantized / GGUF).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="ends within its header"):
        first_token(quantized, backend)


@pytest.mark.parametrize(("heads", "said"), [(3, "3"), (None, "None"), ([4, 4], r"\[4, 4\]")])
def test_rows_of_no_whole_heads_are_refused(tmp_path, monkeypatch, heads, said):
    quantized, _ = write_pair(tmp_path, "llama", {})
    name = "llama.attention.head_count"
    found = read_gguf(quantized / GGUF)
    fields = {each: value for each, value in found.fields.items() if each != name} | ({name: heads} if heads else {})
    monkeypatch.setattr(gguf_file, "read_header", lambda _: found._replace(fields=fields))
    with pytest.raises(
        CheckpointError,
        match=rf"tensor blk\.0\.attn_q\.weight has 256 rows, .* {said} heads \({name}\) of an even size",
    ):
        find_weights(quantized)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_shapes_that_are_not_the_models_are_named(tmp_path, kind):
    quantized, _ = write_pair(tmp_path, "qwen2", {"down_proj": kind})
    change_config(quantized, {"intermediate_size": 256})
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.ffn_\w+\.weight has shape \[.*\].* needs? \[.*256.*\]"):
        first_token(quantized, "torch")


def test_a_vector_that_is_quantized_is_refused(tmp_path):
    place = Place(tmp_path, "blk.0.attn_norm.weight", "Q8_0", (64,), 0, 68)
    with pytest.raises(CheckpointError, match=r"norm is quantized, but it is not a matrix: the model needs \[64\]"):
        Files("cpu").stored("norm", Weight(None, {BLOCKS: place}), (64,), None)
