"""A checkpoint folder for a GGUF file: its configuration, tokenizer and chat template as files of their own, and the
GGUF file itself, which the engine reads its weights from."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.fingerprint import file_fingerprint
from sluice.checkpoint.gguf import SUFFIX, Gguf, GgufError, read_gguf
from sluice.checkpoint.weight_files import GGUF
from sluice.gguf.config import config_of, generation_of
from sluice.gguf.tokenizer import ARCHITECTURE, PREFIX

VERSION = 1
"""Of what is written. A folder that another version wrote is not used again."""
TEMPLATE = "tokenizer.chat_template"
TOOL_USE = f"{TEMPLATE}.tool_use"


def cache_folder() -> Path:
    """For what this user's programs need not make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"


def is_gguf(model: str) -> bool:
    """Whether `model` is a GGUF file, or a folder with one in place of a checkpoint."""
    return _file(Path(model).expanduser()) is not None


def gguf_folder(model: str) -> Path:
    """The folder of the GGUF file, in the user's cache; written when it is first needed. Raises CheckpointError."""
    found = _file(Path(model).expanduser())
    if found is None:
        raise CheckpointError(f"{model} is not a GGUF file")
    file = found.resolve()
    cache = cache_folder() / "gguf"
    folder = cache / f"{file.stem}-{file_fingerprint(file)}-{VERSION}"
    if folder.is_dir() and (folder / GGUF).resolve() == file:
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        made = Path(work) / "made"
        convert(file, made, link=True)
        if folder.is_dir():
            # The file has moved.
            shutil.rmtree(folder)
        try:
            made.rename(folder)
        except OSError:
            # Another process has written it meanwhile.
            if not folder.is_dir():
                raise
    return folder


def convert(file: Path, folder: Path, *, link: bool = False) -> None:
    """Write the checkpoint folder, with a copy of the file, or a link to it. Raises CheckpointError, and
    FileExistsError if there is such a folder."""
    folder.mkdir(parents=True)
    try:
        gguf = read_gguf(file)
        files: dict[str, Any] = {"config.json": config_of(file, gguf)}
        _write_tokenizer(gguf, folder)
        files["generation_config.json"] = generation_of(gguf)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        _write_templates(gguf, folder)
    except GgufError as error:
        shutil.rmtree(folder)
        raise CheckpointError(f"{file} {error}") from error
    if link:
        (folder / GGUF).symlink_to(file.resolve())
    else:
        shutil.copyfile(file, folder / GGUF)


def _file(path: Path) -> Path | None:
    if path.is_file() and path.suffix == SUFFIX:
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise CheckpointError(f"{path} has {len(found)} GGUF files: name one of them, such as {found[0]}")
    return found[0] if found else None


def _write_tokenizer(gguf: Gguf, folder: Path) -> None:
    used = {name: value for name, value in gguf.fields.items() if name.startswith(PREFIX) or name == ARCHITECTURE}
    command = [sys.executable, "-m", "sluice.gguf.tokenizer", str(folder)]
    done = subprocess.run(command, input=msgspec.msgpack.encode(used), capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["the conversion of its tokenizer failed"]
        raise GgufError(lines[-1])


def _write_templates(gguf: Gguf, folder: Path) -> None:
    for key, name in ((TEMPLATE, "chat_template.jinja"), (TOOL_USE, "additional_chat_templates/tool_use.jinja")):
        template = gguf.fields.get(key)
        if isinstance(template, str):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(template, encoding="utf-8")
