import json
import os
import shutil

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from sluice.ring.checkpoint import CheckpointError, open_checkpoint
from sluice.tiny_model import path


def copy_of_tiny(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((path() / name).read_bytes())
    return tmp_path


def test_the_model_in_the_box_opens():
    checkpoint = open_checkpoint(str(path()), "tiny")
    assert checkpoint.name == "tiny"
    assert checkpoint.eos_token_ids
    assert checkpoint.chat_template
    assert checkpoint.max_context_tokens >= 1024
    assert checkpoint.fingerprint == open_checkpoint(str(path())).fingerprint


def test_the_fingerprint_follows_the_files(tmp_path):
    folder = copy_of_tiny(tmp_path)
    before = open_checkpoint(str(folder)).fingerprint
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1}))
    assert open_checkpoint(str(folder)).fingerprint != before


def weights(first: int = 0, header: bytes = b"{}", size: int = 300_000) -> bytearray:
    return bytearray(len(header).to_bytes(8, "little") + header + bytes([first]) * size)


@pytest.mark.parametrize("at", [0, 2, 10, 1000, 150_000, -1])
def test_the_fingerprint_follows_the_weights(tmp_path, at):
    """Of equal names, sizes and headers, as of two that were made of one model."""
    folder = copy_of_tiny(tmp_path)
    file, content = folder / "model.safetensors", weights()
    file.write_bytes(content)
    before = open_checkpoint(str(folder))
    content[at] ^= 1
    file.write_bytes(content)
    after = open_checkpoint(str(folder))
    assert after.fingerprint != before.fingerprint
    assert after.tokenizer_fingerprint == before.tokenizer_fingerprint


def test_of_weights_some_is_read_from_all_over_and_the_header_whole(tmp_path):
    folder = copy_of_tiny(tmp_path)
    file = folder / "model.safetensors"

    def seen(content: bytearray) -> str:
        file.write_bytes(content)
        return open_checkpoint(str(folder)).fingerprint

    plain, header = seen(weights()), b"{%s}" % (b" " * 40_000)
    assert len({plain, seen(weights(1)), seen(weights(size=1)), seen(weights(size=0)), seen(bytearray())}) == 5
    changed = header[:20_000] + b"\n" + header[20_001:]
    assert seen(weights(header=header)) != seen(weights(header=changed))


def safetensors(sizes: dict[str, int]) -> bytearray:
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end := end + size]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | offsets).encode()
    return bytearray(len(header).to_bytes(8, "little") + header + bytes(end))


def test_of_every_tensor_some_is_read(tmp_path):
    """Two models that differ in one layer of many are two."""
    folder = copy_of_tiny(tmp_path)
    file = folder / "model.safetensors"
    content = safetensors({f"layer.{i}": 20_000 for i in range(600)})
    start = len(content) - 600 * 20_000

    def seen() -> str:
        file.write_bytes(content)
        return open_checkpoint(str(folder)).fingerprint

    found = {seen()}
    for layer in range(0, 600, 23):
        middle = start + 20_000 * layer + 10_000
        content[middle - 300 : middle + 300] = bytes([1]) * 600
        found.add(seen())
    assert len(found) == 1 + len(range(0, 600, 23))


@pytest.mark.parametrize("offsets", [[0, 99], [-1, 5], [5, 1], ["a", "b"], [0], None])
def test_a_header_that_lies_is_no_obstacle(tmp_path, offsets):
    """Loading tells what is wrong with it."""
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
def test_every_file_that_decides_on_tokens_counts(tmp_path, name):
    folder = shutil.copytree(path(), tmp_path / "model")
    before = open_checkpoint(str(folder)).fingerprint
    with (folder / name).open("a") as file:
        file.write(" ")
    assert open_checkpoint(str(folder)).fingerprint != before


def test_two_copies_are_one_model(tmp_path):
    """Whatever their paths, their dates and what else lies in them."""
    first, second = (shutil.copytree(path(), tmp_path / name, copy_function=shutil.copyfile) for name in ("a", "b"))
    (second / "README.md").write_text("a note")
    os.utime(second / "model.safetensors", (0, 0))
    found = {open_checkpoint(str(folder)).fingerprint for folder in (path(), first, second)}
    assert len(found) == 1


def test_a_revision_of_a_hub_model(monkeypatch, tmp_path):
    asked = []

    def download(model, **options):
        asked.append((model, options["revision"]))
        return str(path())

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    found = open_checkpoint("someone/model", revision="v2")
    assert found.fingerprint == open_checkpoint("someone/model").fingerprint == open_checkpoint(str(path())).fingerprint
    assert asked == [("someone/model", "v2"), ("someone/model", None)]


def test_a_folder_has_no_revisions(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"revision 'v2' applies only to Hugging Face models, but '.*' is a local folder"
    ):
        open_checkpoint(str(copy_of_tiny(tmp_path)), revision="v2")


def test_a_revision_that_is_not_there_is_named(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(model, **options):
        raise LocalEntryNotFoundError("not found")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"someone/model, revision 'v9', .*not found"):
        open_checkpoint("someone/model", revision="v9")


def test_eos_ids_fall_back_to_the_config(tmp_path):
    folder = copy_of_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert open_checkpoint(str(folder)).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"max_position_embeddings": 77}, 77),
        ({"n_positions": 66}, 66),
        ({"max_position_embeddings": None, "max_seq_len": 55}, 55),
        ({}, 2048),
    ],
)
def test_the_longest_context_by_any_of_its_names(tmp_path, given, tokens):
    folder = copy_of_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | given))
    assert open_checkpoint(str(folder)).max_context_tokens == tokens


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "nothing"])
def test_what_is_no_model_is_named(model):
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
def test_what_is_often_given_instead_gets_a_way_out(tmp_path, model, named):
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
def test_why_a_download_failed(monkeypatch, error, named):
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
