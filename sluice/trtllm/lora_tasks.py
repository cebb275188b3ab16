"""The LoRA adapters of an executor by task id. A task's first request brings its weights; later ones only name it."""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from sluice.checkpoint.peft import CONFIG, WEIGHTS
from sluice.executor import LoRARequest
from sluice.executor.forks import remove_with
from sluice.trtllm.errors import OptionError
from sluice.trtllm.lora import PeftFiles, to_peft
from sluice.trtllm.model_inputs import LoraConfig

log = logging.getLogger("sluice.trtllm")

THEIR_CONFIG, THEIR_WEIGHTS = "model.lora_config.npy", "model.lora_weights.npy"


def not_cached(task_id: int) -> str:
    """TensorRT-LLM's error message, which tells programs to send the weights."""
    return f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"


class LoraTasks:
    """The adapters' files, kept on disk so that they can be uploaded again if the server drops them. Thread-safe."""

    def __init__(self, model: Mapping[str, Any], prefetch_dir: str | None = None) -> None:
        """`model` is the model's config.json; `prefetch_dir` has a folder with an adapter for each of some task ids.

        Raises OptionError, UnsupportedOptionError.
        """
        self._model = model
        self._folder = Path(mkdtemp(prefix="sluice-lora-"))
        self._remove = remove_with(self, self._folder)
        self._lock = threading.Lock()
        self._tasks: dict[int, LoRARequest] = {}
        self._refused: set[int] = set()
        """Tasks whose weights the server refused, so that a request may bring others."""
        if prefetch_dir is not None:
            self._read_all(Path(prefetch_dir))

    def find(self, config: LoraConfig) -> LoRARequest:
        """The adapter that a request uses, after its weights, if it has any, were stored.

        It has no path if the weights are unknown. Raises OptionError, UnsupportedOptionError.
        """
        task_id = int(config.task_id)
        if config.weights is None:
            return self._tasks.get(task_id) or LoRARequest(str(task_id), task_id)
        files = to_peft(config, self._model)
        with self._lock:
            known = self._tasks.get(task_id)
            if known is None or task_id in self._refused:
                self._refused.discard(task_id)
                known = self._tasks[task_id] = self._write(task_id, files)
            elif files != _read(Path(known.path)):
                raise OptionError(f"LoraConfig.task_id {task_id} already has other weights: choose another task_id")
        return known

    def mark_refused(self, adapter: LoRARequest) -> None:
        """Note that the server cannot load the adapter: its task id is free for other weights."""
        with self._lock:
            if self._tasks.get(adapter.adapter_id) == adapter:
                self._refused.add(adapter.adapter_id)

    def close(self) -> None:
        """Remove the files."""
        self._remove()

    def _write(self, task_id: int, files: PeftFiles) -> LoRARequest:
        # A new folder, since an earlier request of the task may still need the files that these replace.
        folder = Path(mkdtemp(prefix=f"{task_id}-", dir=self._folder))
        (folder / CONFIG).write_bytes(files.config_json)
        (folder / WEIGHTS).write_bytes(files.safetensors)
        return LoRARequest(str(task_id), task_id, str(folder))

    def _read_all(self, folder: Path) -> None:
        if not folder.is_dir():
            raise OptionError(f"PeftCacheConfig.lora_prefetch_dir is {str(folder)!r}, must be a folder")
        for adapter in sorted(folder.iterdir()):
            if not adapter.is_dir():
                continue
            if not (adapter.name.isascii() and adapter.name.isdigit()):
                log.warning("lora_prefetch_dir: skipping %s, whose name is not a task id", adapter.name)
                continue
            if (adapter / CONFIG).is_file():
                self._tasks[int(adapter.name)] = LoRARequest(adapter.name, int(adapter.name), str(adapter))
            else:
                self.find(_load(adapter))


def _read(folder: Path) -> PeftFiles:
    return PeftFiles((folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes())


def _load(folder: Path) -> LoraConfig:
    """Load an adapter saved by TensorRT-LLM's hf_lora_convert.py, whose arrays have a leading dimension of 1.

    Raises OptionError.
    """
    import numpy as np

    try:
        weights, config = (np.load(folder / name, allow_pickle=False) for name in (THEIR_WEIGHTS, THEIR_CONFIG))
    except (OSError, ValueError) as error:
        raise OptionError(f"lora_prefetch_dir: cannot load an adapter from {folder}: {error}") from error
    return LoraConfig(int(folder.name), *(array.reshape(array.shape[-2:]) for array in (weights, config)))
