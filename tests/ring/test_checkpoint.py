import json

import pytest

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


def test_broken_and_missing_files_are_named(tmp_path):
    folder = copy_of_tiny(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        open_checkpoint(str(folder))
