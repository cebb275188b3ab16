"""LoRA adapters: TensorRT-LLM's tensors become the two files that peft saves, kept by task id."""

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice.checkpoint.peft import CONFIG, WEIGHTS
from sluice.executor import LoRARequest
from sluice.executor.forks import remove_with
from sluice.trtllm.options import OptionError, UnsupportedOptionError
from sluice.trtllm.request import LoraConfig

if TYPE_CHECKING:
    import torch

log = logging.getLogger("sluice.trtllm")

MODULES = (
    "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate", "cross_attn_qkv",
    "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense", "moe_h_to_4h", "moe_4h_to_h", "moe_gate",
    "moe_router", "mlp_router", "mlp_gate_up", "shared_expert_h_to_4h", "shared_expert_4h_to_h", "shared_expert_gate",
)  # fmt: skip
"""Module names by TensorRT-LLM's module id (cpp/include/tensorrt_llm/runtime/loraModule.h)."""
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_dense": "self_attn.o_proj",
    "mlp_h_to_4h": "mlp.gate_proj",
    "mlp_4h_to_h": "mlp.down_proj",
    "mlp_gate": "mlp.up_proj",
}
"""Names of modules within a layer of a checkpoint, as in TensorRT-LLM's hf_lora_convert.py."""
PREFIX = "base_model.model.model.layers"
FUSED = ("attn_qkv", "mlp_gate_up")
THEIR_CONFIG, THEIR_WEIGHTS = "model.lora_config.npy", "model.lora_weights.npy"
DTYPES = ("float32", "float16", "bfloat16")


class PeftFiles(NamedTuple):
    config_json: bytes
    safetensors: bytes


class Part(NamedTuple):
    """The low-rank update BAx that an adapter adds to one linear layer."""

    path: str
    """Layer number and name, such as "3.self_attn.q_proj"."""
    a: "torch.Tensor"
    """[r, inputs]"""
    b: "torch.Tensor"
    """[outputs, r], multiplied by the adapter's scaling."""


def to_peft(config: LoraConfig, model: Mapping[str, Any]) -> PeftFiles:
    """The files of an adapter for the model with the config.json `model`.

    Raises OptionError for an invalid adapter, UnsupportedOptionError for an unsupported one.
    """
    from safetensors.torch import save

    parts = list(_parts(config, model))
    tensors, ranks = {}, {}
    for part in parts:
        name = f"{PREFIX}.{part.path}"
        if f"{name}.lora_A.weight" in tensors:
            raise OptionError(f"LoraConfig.config has two rows for the same layer and module, {part.path}")
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = part.a, part.b
        ranks[f"layers.{part.path}"] = len(part.a)
    rank = max(ranks.values())
    smaller_ranks = {name: layer_rank for name, layer_rank in ranks.items() if layer_rank != rank}
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        # The weights include the scaling, so alpha / r is 1.
        "lora_alpha": rank,
        "target_modules": sorted({part.path.rpartition(".")[2] for part in parts}),
        "bias": "none",
        **({"rank_pattern": smaller_ranks, "alpha_pattern": smaller_ranks} if smaller_ranks else {}),
    }
    return PeftFiles(json.dumps(peft_config).encode(), save(tensors))


def _parts(config: LoraConfig, model: Mapping[str, Any]) -> Iterator[Part]:
    import torch

    weights, rows = torch.as_tensor(config.weights), torch.as_tensor(config.config).tolist()
    if str(weights.dtype).removeprefix("torch.") not in DTYPES:
        raise OptionError(f"LoraConfig.weights has the dtype {weights.dtype}, must be one of {', '.join(DTYPES)}")
    if not rows:
        raise OptionError("LoraConfig.config has no rows")
    if len(rows[0]) not in (3, 4):
        raise OptionError(f"LoraConfig.config has {len(rows[0])} columns, must have 3 or 4")
    for row, values in zip(rows, weights, strict=True):
        module, layer, rank, *dora = row
        if any(dora):
            raise UnsupportedOptionError("LoraConfig.config: DoRA", "only plain LoRA adapters are supported")
        name = MODULES[module] if 0 <= module < len(MODULES) else f"the module id {module}"
        inputs, outputs = _shape(name, model)
        layers = model.get("num_hidden_layers", 0)
        if not 0 <= layer < layers:
            raise OptionError(f"LoraConfig.config: the layer of {name} is {layer}, must be from 0 to {layers - 1}")
        if rank < 1 or rank * (inputs + outputs) > len(values):
            raise OptionError(
                f"LoraConfig.config: the adapter size of {name} in layer {layer} is {rank}, must be at least 1 and at "
                f"most {len(values) // (inputs + outputs)}, for which LoraConfig.weights has values"
            )
        a, b = values[: rank * (inputs + outputs)].split([rank * inputs, rank * outputs])
        # Copied, because safetensors does not save tensors that share memory.
        yield Part(f"{layer}.{NAMES[name]}", a.view(rank, inputs).clone(), b.view(outputs, rank).clone())


def _shape(module: str, model: Mapping[str, Any]) -> tuple[int, int]:
    """The (inputs, outputs) of a linear layer. Raises UnsupportedOptionError."""
    if module not in NAMES:
        reason = "give its parts as separate rows" if module in FUSED else "adapters cannot apply to this module"
        raise UnsupportedOptionError(f"LoraConfig.config: {module}", reason)
    try:
        hidden, heads, inner = (model[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    except KeyError as error:
        raise UnsupportedOptionError("LoraConfig.weights", f"the model's config.json has no {error}") from error
    size = model.get("head_dim") or hidden // heads
    queries, keys = heads * size, (model.get("num_key_value_heads") or heads) * size
    shapes = {
        "attn_q": (hidden, queries),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, keys),
        "attn_dense": (queries, hidden),
        "mlp_h_to_4h": (hidden, inner),
        "mlp_4h_to_h": (inner, hidden),
        "mlp_gate": (hidden, inner),
    }
    return shapes[module]


def not_cached(task_id: int) -> str:
    """TensorRT-LLM's error message, which tells programs to send the weights."""
    return f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"


class LoraTasks:
    """The adapters' files, kept on disk so that they can be uploaded again if the server drops them. Thread-safe."""

    def __init__(self, model: Mapping[str, Any], prefetch_dir: str | None = None) -> None:
        """`model` is the model's config.json; `prefetch_dir` has a folder, named by task id, for each adapter.

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
        """Store the weights of a request, if it has any, and return the adapter that it uses.

        The adapter has no path if its weights are unknown. Raises OptionError, UnsupportedOptionError.
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
