import json
import math
import os
import shutil

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.tiny_model import path


def copy_of_tiny(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((path() / name).read_bytes())
    return tmp_path


def test_the_bundled_model_can_be_opened():
    checkpoint = open_checkpoint(str(path()), "tiny")
    assert checkpoint.name == "tiny"
    assert checkpoint.eos_token_ids
    assert checkpoint.chat_template
    assert checkpoint.max_context_tokens >= 1024
    assert checkpoint.fingerprint == open_checkpoint(str(path())).fingerprint


def test_the_fingerprint_depends_on_the_files(tmp_path):
    folder = copy_of_tiny(tmp_path)
    before = open_checkpoint(str(folder)).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1}))
    assert open_checkpoint(str(folder)).fingerprint != before


def weights(first: int = 0, header: bytes = b"{}", size: int = 300_000) -> bytearray:
    return bytearray(len(header).to_bytes(8, "little") + header + bytes([first]) * size)


@pytest.mark.parametrize("at", [0, 2, 10, 1000, 150_000, -1])
def test_the_fingerprint_depends_on_the_weights(tmp_path, at):
    """The files have equal names, sizes and headers, like those of two fine-tuned versions of a model."""
    folder = copy_of_tiny(tmp_path)
    file, content = folder / "model.safetensors", weights()
    file.write_bytes(content)
    before = open_checkpoint(str(folder))
    content[at] ^= 1
    file.write_bytes(content)
    after = open_checkpoint(str(folder))
    assert after.fingerprint != before.fingerprint
    assert after.tokenizer_fingerprint == before.tokenizer_fingerprint


def test_samples_are_spread_over_the_weights_and_the_header_is_read_completely(tmp_path):
    folder = copy_of_tiny(tmp_path)
    file = folder / "model.safetensors"

    def fingerprint_of(content: bytearray) -> str:
        file.write_bytes(content)
        return open_checkpoint(str(folder)).fingerprint

    plain, header = fingerprint_of(weights()), b"{%s}" % (b" " * 40_000)
    contents = (weights(1), weights(size=1), weights(size=0), bytearray())
    assert len({plain, *map(fingerprint_of, contents)}) == 5
    changed = header[:20_000] + b"\n" + header[20_001:]
    assert fingerprint_of(weights(header=header)) != fingerprint_of(weights(header=changed))


def safetensors(sizes: dict[str, int]) -> bytearray:
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end := end + size]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | offsets).encode()
    return bytearray(len(header).to_bytes(8, "little") + header + bytes(end))


def test_every_tensor_is_sampled(tmp_path):
    """Models that differ in one of many layers have different fingerprints."""
    folder = copy_of_tiny(tmp_path)
    file = folder / "model.safetensors"
    content = safetensors({f"layer.{i}": 20_000 for i in range(600)})
    start = len(content) - 600 * 20_000

    def fingerprint_of() -> str:
        file.write_bytes(content)
        return open_checkpoint(str(folder)).fingerprint

    fingerprints = {fingerprint_of()}
    for layer in range(0, 600, 23):
        middle = start + 20_000 * layer + 10_000
        content[middle - 300 : middle + 300] = bytes([1]) * 600
        fingerprints.add(fingerprint_of())
    assert len(fingerprints) == 1 + len(range(0, 600, 23))


@pytest.mark.parametrize("offsets", [[0, 99], [-1, 5], [5, 1], ["a", "b"], [0], None])
def test_a_wrong_header_does_not_prevent_a_fingerprint(tmp_path, offsets):
    """The error is reported when the weights are loaded."""
    folder = copy_of_tiny(tmp_path)
    header = json.dumps({"layer": {"data_offsets": offsets}}).encode()
    content = bytearray(len(header).to_bytes(8, "little") + header + bytes(10))
    (folder / "model.safetensors").write_bytes(content)
    before = open_checkpoint(str(folder)).fingerprint
    content[-5] = 1
    (folder / "model.safetensors").write_bytes(content)
    assert open_checkpoint(str(folder)).fingerprint != before


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_the_fingerprint_depends_on_every_file_that_affects_tokens(tmp_path, name):
    folder = shutil.copytree(path(), tmp_path / "model")
    before = open_checkpoint(str(folder)).fingerprint
    with (folder / name).open("a") as file:
        file.write(" ")
    assert open_checkpoint(str(folder)).fingerprint != before


def test_copies_of_a_model_have_the_same_fingerprint(tmp_path):
    """Paths, dates and unrelated files do not matter."""
    first, second = (shutil.copytree(path(), tmp_path / name, copy_function=shutil.copyfile) for name in ("a", "b"))
    (second / "README.md").write_text("a note")
    os.utime(second / "model.safetensors", (0, 0))
    fingerprints = {open_checkpoint(str(folder)).fingerprint for folder in (path(), first, second)}
    assert len(fingerprints) == 1


def test_a_revision_of_a_hub_model(monkeypatch, tmp_path):
    downloads = []

    def download(model, **options):
        downloads.append((model, options["revision"]))
        return str(path())

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    checkpoint = open_checkpoint("someone/model", revision="v2")
    assert (
        checkpoint.fingerprint
        == open_checkpoint("someone/model").fingerprint
        == open_checkpoint(str(path())).fingerprint
    )
    assert downloads == [("someone/model", "v2"), ("someone/model", None)]


def test_a_revision_of_a_folder_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"revision 'v2' applies only to Hugging Face models, but '.*' is a local folder"
    ):
        open_checkpoint(str(copy_of_tiny(tmp_path)), revision="v2")


def test_an_unknown_revision_is_named(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(model, **options):
        raise LocalEntryNotFoundError("not found")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"someone/model, revision 'v9', .*not found"):
        open_checkpoint("someone/model", revision="v9")


@pytest.mark.parametrize(
    ("generation", "config", "own", "ids"),
    [
        (None, 7, None, (7,)),
        ([4095, 5], 7, None, (4095, 5, 7)),
        ([4095, 7], [7], "<|im_end|>", (4095, 7)),
        (2, None, {"content": "<|endoftext|>"}, (2, 4093)),
        (None, None, "e", (68,)),
        (2, None, "not a token", (2,)),
        (None, None, None, ()),
    ],
)
def test_eos_ids_are_those_of_all_files(tmp_path, generation, config, own, ids):
    folder = copy_of_tiny(tmp_path)
    for name, field, value in [
        ("generation_config.json", "eos_token_id", generation),
        ("config.json", "eos_token_id", config),
        ("tokenizer_config.json", "eos_token", own),
    ]:
        content = json.loads((path() / name).read_text())
        (folder / name).write_text(json.dumps(content | {field: value}))
    assert open_checkpoint(str(folder)).eos_token_ids == ids


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("written", [math.inf, {"__float__": "Infinity"}], ids=["plain", "as transformers writes it"])
def test_infinity_in_a_configuration_is_read(tmp_path, written):
    folder = copy_of_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    given = {"time_step_limit": [0.0, written], "other": {"__float__": "x"}}
    (folder / "config.json").write_text(json.dumps(config | given))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.config["time_step_limit"] == [0.0, math.inf]
    assert checkpoint.config["other"] == {"__float__": "x"}


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"max_position_embeddings": 77}, 77),
        ({"n_positions": 66}, 66),
        ({"max_position_embeddings": None, "max_seq_len": 55}, 55),
        ({}, 2048),
        ({"max_position_embeddings": 40, "rope_scaling": YARN}, 128),
        ({"max_position_embeddings": 40, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 160),
        ({"max_position_embeddings": 40, "rope_parameters": YARN | {"factor": math.inf}}, 40),
        ({"max_position_embeddings": 40, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 40),
    ],
)
def test_the_context_length_is_read_under_any_of_its_names(tmp_path, given, tokens):
    folder = copy_of_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"], config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config | given))
    assert open_checkpoint(str(folder)).max_context_tokens == tokens


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "nothing"])
def test_a_missing_model_is_named(model):
    with pytest.raises(CheckpointError, match=r"nothing|no/such"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "use the model's Hugging Face id, Qwen/Qwen3-0.6B"),
        ("{folder}/model.gguf", "GGUF"),
        ("{folder}/model.safetensors", "is a file: use its folder"),
        ("{folder}/gguf", "GGUF"),
        ("{folder}/slow", "AutoTokenizer"),
        ("{folder}/lora", "LoRA adapter"),
        ("{folder}/empty", "has no config.json"),
    ],
)
def test_frequent_mistakes_are_reported_with_a_remedy(tmp_path, model, named):
    for name in ("model.gguf", "model.safetensors", "gguf/m.gguf", "lora/adapter_config.json", "slow/tokenizer.model"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "slow" / "config.json").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(model.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (HFValidationError("bad id"), "it is not a valid Hugging Face id: bad id"),
        (LocalEntryNotFoundError("long\ntext"), "Hugging Face cannot be reached"),
        (OSError("disk full"), "could not be downloaded from Hugging Face: disk full"),
    ],
)
def test_the_reason_of_a_failed_download_is_reported(monkeypatch, error, named):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(CheckpointError, match=named) as caught:
        open_checkpoint("some/model")
    assert "\n" not in str(caught.value)


def test_broken_and_missing_files_are_named(tmp_path):
    folder = copy_of_tiny(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_checkpoint(str(folder))
