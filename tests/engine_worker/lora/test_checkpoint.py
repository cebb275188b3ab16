"""Files from users: what peft saves is read, everything else is rejected with a reason before it takes memory."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from engine_worker.layers.adapters import Target
from engine_worker.layers.shard import Span
from engine_worker.lora.checkpoint import AdapterError, read_adapter, read_files
from engine_worker.lora.tensor_file import read_matrices
from sluice.checkpoint.tensor_file import TensorFileError
from sluice.wire.adapters import AdapterFiles
from tests.engine_worker.lora.oracle import changed_config
from tests.examples import examples

NAMES = {"self_attn": ("q_proj", "v_proj"), "mlp": ("down_proj",)}
TARGETS = {
    found.path: found
    for layer in range(2)
    for block, names in NAMES.items()
    for name in names
    for found in [Target(layer, block, name, name, Span(0, 6, 6), Span(0, 10, 10), 0)]
}
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


def files(tensors=None, **config) -> AdapterFiles:
    tensors = {Q.format("A"): torch.ones(4, 6), Q.format("B"): torch.ones(10, 4)} if tensors is None else tensors
    return AdapterFiles(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config).encode(), save(tensors))


def read(some: AdapterFiles, dtype=torch.float32):
    return read_adapter(some, TARGETS, 16, dtype)


def test_scaling():
    (module,) = read(files()).modules
    assert torch.equal(module.a, torch.ones(4, 6))
    assert torch.equal(module.b, torch.full((4, 10), 2.0))
    assert torch.equal(read(files(use_rslora=True)).modules[0].b, torch.full((4, 10), 4.0))
    assert torch.equal(read(files(alpha_pattern={"q_proj": 2})).modules[0].b, torch.full((4, 10), 0.5))
    assert torch.equal(read(files(alpha_pattern={"^model.layers.1.self_attn.q_proj": 2})).modules[0].b, module.b)


@pytest.mark.parametrize("decoder", ["model.language_model.", "language_model.model."])
def test_the_decoder_of_a_vision_language_model(decoder):
    """Modules of the decoder have a prefix in their names, also in patterns."""
    named = {side: Q.format(side).replace("model.layers", f"{decoder}layers") for side in "AB"}
    tensors = {named["A"]: torch.ones(4, 6), named["B"]: torch.ones(10, 4)}
    (module,) = read(files(tensors)).modules
    assert module.target.path == "layers.0.self_attn.q_proj"
    for key, value in (
        (f"{decoder}layers.0.self_attn.q_proj", 0.5),
        (f"^{decoder}layers.0.self_attn.q_proj$", 0.5),
        ("layers.0.self_attn.q_proj", 0.5),
        # With a circumflex the whole name must match, and no module has this name.
        ("^model.layers.0.self_attn.q_proj", 2.0),
        ("model.layers.1.self_attn.q_proj", 2.0),
    ):
        (module,) = read(files(tensors, alpha_pattern={key: 2})).modules
        assert torch.equal(module.b, torch.full((4, 10), value))
    with pytest.raises(AdapterError, match="the same module"):
        read(files(tensors | {Q.format("A"): torch.ones(4, 6)}))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias must be none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"to_come": 1}, "to_come"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),
        ({"init_lora_weights": "loftq"}, "loftq"),
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"r": 0}, "rank"),
        ({"r": 10**9}, "ranks up to 16"),
        ({"r": True}, "rank"),
        ({"lora_alpha": "many"}, "lora_alpha"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"rank_pattern": {"(a+)+$": 3}}, "names of modules"),
        ({"rank_pattern": {"q_proj": 3}}, "rank 3 require"),
        ({"alpha_pattern": []}, None),
        ({"alpha_pattern": "x"}, "alpha_pattern"),
        ({"alpha_pattern": {f"m{i}": 1 for i in range(5000)}}, "alpha_pattern"),
    ],
)
def test_options_that_change_the_meaning_are_rejected_by_name(config, named):
    if named is None:
        read(files(**config))
        return
    with pytest.raises(AdapterError, match=named):
        read(files(**config))


def with_tensors(**changes):
    tensors = load(files().weights) | changes
    return files({name: tensor for name, tensor in tensors.items() if tensor is not None})


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (with_tensors(**{Q.format("A"): torch.ones(4, 7)}), "shape"),
        (with_tensors(**{Q.format("A"): torch.ones(3, 6)}), "shape"),
        (with_tensors(**{Q.format("B"): torch.ones(4, 10)}), "shape"),
        (with_tensors(**{Q.format("B"): torch.ones(40)}), "matrix"),
        (with_tensors(**{Q.format("B"): None}), "has no lora_B"),
        (with_tensors(**{Q.format("A"): torch.ones(4, 6).mul(torch.nan)}), "not finite"),
        (with_tensors(**{Q.format("B"): torch.full((10, 4), torch.inf)}), "not finite"),
        (with_tensors(**{Q.format("A"): torch.ones(4, 6, dtype=torch.int8)}), "I8"),
        (with_tensors(**{Q.format("A"): torch.ones(4, 6, dtype=torch.float64)}), "F64"),
        (with_tensors(**{"base_model.model.lm_head.lora_A.weight": torch.ones(4, 6)}), "output head"),
        (with_tensors(**{Q.format("A").replace("layers", "vision_tower.layers"): torch.ones(4, 6)}), "vision tower"),
        (with_tensors(**{"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 6)}), "embedding"),
        (with_tensors(**{Q.format("magnitude_vector"): torch.ones(4, 6)}), "DoRA"),
        (with_tensors(**{Q.format("A").replace("layers.0", "layers.7"): torch.ones(4, 6)}), "cannot change"),
        (with_tensors(**{Q.format("A").replace("layers.0", "layers.00"): torch.ones(4, 6)}), "cannot change"),
        (with_tensors(**{Q.format("A").replace("q_proj", "gate"): torch.ones(4, 6)}), "cannot change"),
        (with_tensors(**{"../../etc/passwd": torch.ones(4, 6)}), "is not supported"),
        (files({}), "no tensors"),
    ],
)
def test_tensors_that_do_not_fit_are_rejected_by_name(changed, named):
    with pytest.raises(AdapterError, match=named):
        read(changed)


def test_values_that_overflow_in_the_models_dtype_are_rejected():
    big = with_tensors(**{Q.format("B"): torch.full((10, 4), 60000.0)})
    read(big)
    with pytest.raises(AdapterError, match="not finite in float16"):
        read(big, torch.float16)


def zip_of_zeros() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_model.safetensors", bytes(1 << 24))
    return data.getvalue()


def header(entries: object) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(first: int) -> dict:
    return {"dtype": "F32", "shape": [4, 6], "data_offsets": [first, first + 96]}


def test_tensors_that_share_bytes_are_rejected():
    """If they were accepted, a file of 400 KB would take half a gigabyte of memory, and a larger one even more."""
    entry = {"dtype": "F32", "shape": [1, 1 << 16], "data_offsets": [0, 1 << 18]}
    weights = header({f"{Q.format('A')}{i}": entry for i in range(2000)}) + bytes(1 << 18)
    tracemalloc.start()
    try:
        with pytest.raises(TensorFileError, match="not a safetensors file"):
            read_matrices(weights)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "weights",
    [
        header({Q.format("A"): entry(0), Q.format("B"): entry(48)}) + bytes(144),
        header({Q.format("A"): entry(0), Q.format("B"): entry(100)}) + bytes(196),
        header({Q.format("A"): entry(0)}) + bytes(97),
        b"",
        b"\0" * 7,
        bytes(1 << 20),
        zip_of_zeros(),
        pickle.dumps({"a": [1.0]}),
        struct.pack("<Q", 1 << 60) + b"{}",
        header(b"{" * 100_000),
        header(b"[" * 100_000),
        header({Q.format("A"): {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 1 << 50]}}),
        header({Q.format("A"): {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 96]}}) + bytes(96),
        header({Q.format("A"): {"dtype": "F32", "shape": [4, 6], "data_offsets": [96, 0]}}) + bytes(96),
        header({Q.format("A"): {"dtype": "F32", "shape": [4, 0], "data_offsets": [0, 0]}}),
        header({Q.format("A"): {"dtype": "F32", "shape": [-4, -6], "data_offsets": [0, 96]}}) + bytes(96),
        bytes(20 << 20),
    ],
)
def test_files_of_another_kind_are_rejected(weights):
    with pytest.raises(AdapterError, match=r"safetensors|at most|matrix"):
        read(AdapterFiles(files().config, weights))


@pytest.mark.parametrize(
    "config", [b"", b"[]", b"null", b"{" * 100_000, b"[" * 100_000, b"\xff", b'{"\xff": 1}', b" " * (2 << 20)]
)
def test_a_broken_configuration_is_rejected(config):
    with pytest.raises(AdapterError, match=r"adapter_config\.json"):
        read(AdapterFiles(config, files().weights))


@examples(200)
@given(position=st.integers(0, 10_000), value=st.binary(min_size=1, max_size=3), cut=st.integers(0, 10_000))
def test_a_damaged_file_is_rejected_or_read(position, value, cut):
    data = bytearray(files().weights)
    position %= len(data)
    data[position : position + len(value)] = value
    if cut < len(data):
        del data[cut:]
    with suppress(AdapterError):
        read(AdapterFiles(files().config, bytes(data)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read(dtype):
    half = with_tensors(**{name: tensor.to(dtype) for name, tensor in load(files().weights).items()})
    assert torch.equal(read(half).modules[0].b, torch.full((4, 10), 2.0))


def test_folders(tmp_path):
    targets = TARGETS.values()
    with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
        read_files(tmp_path, targets, 16)
    (tmp_path / "adapter_config.json").write_bytes(files().config)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors cannot be read"):
        read_files(tmp_path, targets, 16)
    (tmp_path / "adapter_model.bin").write_bytes(pickle.dumps(1))
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle"):
        read_files(tmp_path, targets, 16)
    with (tmp_path / "adapter_model.safetensors").open("wb") as file:
        # A sparse file takes no disk space, and it is not read.
        file.truncate(1 << 40)
    with pytest.raises(AdapterError, match="at most"):
        read_files(tmp_path, targets, 16)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.safetensors").mkdir()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        read_files(tmp_path, targets, 16)
    (tmp_path / "adapter_model.safetensors").rmdir()
    (tmp_path / "adapter_model.safetensors").write_bytes(files().weights)
    assert read_files(tmp_path, targets, 16) == files()
    assert changed_config(files(), r=5) != files()
