"""Checkpoints with random weights, and their conversions for peers. Each is written once and kept."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.harness.children import ROOT
from bench.harness.models import QWEN3_06B, QWEN3_5M, QWEN3_25M, TINY, write_shape
from bench.peers.catalog import HERE, PeerKind

VARIABLE = "SLUICE_BENCH_MODELS"
"""Environment variable with the folder for checkpoints and conversions. Default: `models` in this folder."""
SHAPES: Mapping[str, Mapping[str, Any]] = {"5M": QWEN3_5M, "25M": QWEN3_25M, "0.6B": QWEN3_06B}
TINY_NAME = "tiny"


def checkpoint(name: str) -> Path:
    """The bundled model, or one of SHAPES with random weights in float32. Raises KeyError for other names."""
    return TINY if name == TINY_NAME else _once(_models() / name, lambda folder: _write(folder, SHAPES[name]))


def converted(kind: PeerKind, name: str, precision: str, log: Path) -> Path:
    """The checkpoint in the format of this peer. Raises RuntimeError if the conversion fails."""
    source = checkpoint(name)

    def convert(folder: Path) -> None:
        command: list[str | Path] = [kind.python, "-m", kind.module, "convert", source, folder, precision]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode:
            raise RuntimeError(f"{kind.title} did not convert {source} to {precision}:\n{done.stderr[-4000:]}")

    return _once(_models() / f"{name}-{kind.name}-{precision}-{kind.version()}", convert)


def _models() -> Path:
    return Path(os.environ.get(VARIABLE) or HERE / "models")


def _once(folder: Path, make: Any) -> Path:
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        make(partial)
        partial.rename(folder)
    return folder


def _write(folder: Path, shape: Mapping[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_shape(folder, shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    config = (folder / "config.json").read_bytes()
    model.save_pretrained(folder)
    # transformers has written the configuration in a format that its older versions cannot read.
    (folder / "config.json").write_bytes(config)
