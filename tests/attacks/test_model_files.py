"""Hostile model files: each is refused in one line that names the file and the key, before memory is allocated."""

import json
import shutil
from pathlib import Path

import pytest

from sluice import tiny_model
from sluice.checkpoint.config import CONTEXT, LARGEST
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint, open_checkpoint
from sluice.checkpoint.servable import check_servable
from sluice.checkpoint.weight_files import INDEX, SINGLE, check_weight_files, weight_files

NESTED = "[" * 200_000 + "]" * 200_000
HUGE = "1" + "0" * 4000
NUMBERS = ["-1", "0", "1e300", "0.5", "Infinity", "NaN", '"8"', "true", "{}", HUGE, str(1 << 40)]


@pytest.fixture
def folder(tmp_path) -> Path:
    for file in tiny_model.path().iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    (tmp_path / SINGLE).symlink_to(tiny_model.path() / SINGLE)
    return tmp_path


def change(file: Path, key: str, value: str) -> None:
    """Set a key to a value in JSON."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content[key] = "PLACE"
    file.write_text(json.dumps(content).replace('"PLACE"', value))


def opened(folder: Path) -> Checkpoint:
    """The checkpoint as all services open it."""
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.max_context_tokens > 0
    assert checkpoint.eos_token_ids
    check_servable(checkpoint)
    check_weight_files(checkpoint.path)
    return checkpoint


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        opened(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message.removeprefix(str(folder) + "/")


@pytest.mark.parametrize("key", LARGEST)
def test_sizes_out_of_bounds(folder, key):
    original = (folder / "config.json").read_text()
    for value in NUMBERS:
        (folder / "config.json").write_text(original)
        change(folder / "config.json", key, value)
        assert refusal(folder).startswith(
            f"config.json: {key} must be an integer from {2 if key in CONTEXT else 1} to {LARGEST[key]} (got "
        )


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ['"2"', "{}", "[[2]]", "[null]", "0.5", "Infinity", HUGE, "true"])
def test_ids_that_are_none(folder, file, value):
    change(folder / file, "eos_token_id", value)
    assert refusal(folder).startswith(f"{file}: eos_token_id must be ")


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("factor", ["1e308", "-4", "0", '"4"', HUGE])
def test_a_context_that_a_scaling_makes_absurd(folder, key, factor):
    for name in ("rope_scaling", "rope_parameters"):
        change(folder / "config.json", name, "null")
    change(folder / "config.json", key, f'{{"rope_type": "yarn", "factor": {factor}}}')
    if factor == '"4"':
        # Not a number: without effect on the context.
        assert opened(folder).max_context_tokens > 0
    else:
        assert refusal(folder).startswith("config.json: factor and original_max_position_embeddings of the rope must ")


@pytest.mark.parametrize(
    "name",
    ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "preprocessor_config.json"],
)
@pytest.mark.parametrize("content", [NESTED, f'{{"a": {NESTED}}}', "[]", "\x00", '"text"'], ids=range(5))
def test_files_that_are_no_objects(folder, name, content):
    (folder / name).write_text(content)
    if name == "preprocessor_config.json":
        # Only vision-language models have this file.
        change(folder / "config.json", "architectures", '["Qwen2VLForConditionalGeneration"]')
    assert refusal(folder).startswith(name)


@pytest.mark.parametrize("vocab", ["3", "[3]", '[["a"]]', '{"<|endoftext|>": "x"}', '{"<|endoftext|>": 1e400}'])
def test_a_vocabulary_that_is_none(folder, vocab):
    change(folder / "tokenizer.json", "added_tokens", "[]")
    change(folder / "tokenizer.json", "model", f'{{"vocab": {vocab}}}')
    assert refusal(folder).startswith("tokenizer.json is not a tokenizer: ")


@pytest.mark.parametrize("template", ["3", "[3]", '[{"name": 1, "template": "a"}]', '{"default": []}', "[[]]"])
def test_chat_templates_that_are_no_texts(folder, template):
    change(folder / "tokenizer_config.json", "chat_template", template)
    assert "chat_template must be a text" in refusal(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "a/"])
def test_an_index_that_names_files_elsewhere(folder, name):
    (folder / SINGLE).rename(folder / "shard.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name, "b": "shard.safetensors"}}))
    assert refusal(folder).startswith(f"{INDEX}: weight_map names ")


@pytest.mark.parametrize("content", [NESTED, '{"weight_map": [1]}', '{"weight_map": {"a": 1, "b": "c"}}', "[]", "3"])
def test_an_index_without_a_map(folder, content):
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(content)
    assert refusal(folder).startswith(f"{INDEX} is not an index of weight files: ")


def test_a_header_that_is_as_large_as_the_file(folder):
    """It is not read: the file may be larger than the memory."""
    (folder / SINGLE).unlink()
    with (folder / SINGLE).open("wb") as file:
        file.write((1 << 33).to_bytes(8, "little"))
        file.truncate(1 << 34)
    assert refusal(folder) == f"{SINGLE} has a header of {1 << 33} bytes, at most 100000000 are allowed"


def test_links_to_files_elsewhere_are_followed(folder):
    """The cache of Hugging Face consists of links."""
    assert weight_files(opened(folder).path) == [folder / SINGLE]
