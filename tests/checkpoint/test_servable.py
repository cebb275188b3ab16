import json
import shutil

import pytest

from sluice import tiny_model
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.checkpoint.servable import check_draft_model


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_model.path(), tmp_path / "draft")


def change(file, **values) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def check(folder) -> None:
    check_draft_model(open_checkpoint(str(tiny_model.path()), "tiny"), open_checkpoint(str(folder)))


def test_another_shape_and_chat_template_are_accepted(folder):
    change(folder / "config.json", num_hidden_layers=3)
    change(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    check(folder)


def test_another_vocab_size_is_refused(folder):
    change(folder / "config.json", vocab_size=5000)
    with pytest.raises(CheckpointError, match=r"draft_model draft: vocab_size must be 4096, as in tiny \(got 5000\)"):
        check(folder)


def test_other_tokens_are_refused(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = (token for token, number in vocabulary.items() if number in (300, 301))
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="draft_model draft: its tokenizer has other tokens than that of tiny"):
        check(folder)
