"""Loads transformers' module for a checkpoint: its class and its weights."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from engine_worker.models.generic.interface import SERVED
from engine_worker.models.generic.quantized import decoded, matrix_shapes
from sluice.checkpoint.errors import CheckpointError, listed
from sluice.checkpoint.folder import Checkpoint
from sluice.checkpoint.quantization import KEYS

LOADING = "Loading weights"
"""Title of transformers' progress bar."""
BATCH_BOUND = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the longest sequence of a batch, so a sequence's result would too."""


@dataclass(frozen=True, slots=True)
class Source:
    """A module class of transformers, and its configuration."""

    module_class: Any
    config: PreTrainedConfig

    @property
    def name(self) -> str:
        return str(self.module_class.__name__)


def read_source(raw: Mapping[str, Any]) -> Source:
    """The class and configuration for config.json. Code shipped with a checkpoint is never run. Raises
    CheckpointError."""
    kind, names = str(raw.get("model_type")), raw.get("architectures") or []
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(f"config.json: model_type {kind!r} is unknown to transformers {transformers.__version__}")
    try:
        # Without the entries that would make transformers replace modules by those of a quantizer.
        config = CONFIG_MAPPING[kind].from_dict({name: value for name, value in raw.items() if name not in KEYS})
    except Exception as error:
        raise CheckpointError(f"config.json is not a valid {kind} configuration: {error}") from error
    module_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if module_class is None or module_class.__name__ not in names:
        raise CheckpointError(
            f"config.json: architectures ({', '.join(map(str, names)) or 'empty'}) names no causal language model of "
            f"model_type {kind!r}"
        )
    if config.is_encoder_decoder:
        raise CheckpointError(f"{module_class.__name__} has an encoder, which is not supported")
    for rope in _rope_types(config):
        if rope in BATCH_BOUND:
            raise CheckpointError(f"rope type {rope!r} is not supported: it depends on the longest sequence of a batch")
    return Source(module_class, config)


def build(source: Source, attention: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The module, with transformers' random initial weights."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(source.config, dtype=dtype, attn_implementation=attention)


def load(
    source: Source,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Any:
    """The module with a checkpoint's weights; transformers handles renamed, fused and tied tensors.

    `progress` is called with the bytes loaded and the bytes in total. Raises CheckpointError if files are missing or
    broken, if tensors are missing, unexpected or of another shape, or if other weights than matrices are quantized.
    """
    folder, quantization = checkpoint.path, checkpoint.quantization
    # Loading directly to a device needs accelerate; without it the weights are loaded to host memory first.
    direct = device if device.type != "cpu" and find_spec("accelerate") else None
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    weights: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    report_loaded = progress
    if quantization is not None:
        shapes = matrix_shapes(build(source, SERVED, dtype, torch.device("meta")))
        state = decoded(folder, shapes, quantization, dtype, lambda done: progress(done, total))
        weights = {"pretrained_model_name_or_path": None, "state_dict": state}
        # Reading and decoding took the time.
        report_loaded = lambda *_: None  # noqa: E731
    try:
        with _progress_bar(report_loaded, total):
            module, report = source.module_class.from_pretrained(
                **weights,
                config=source.config,
                dtype=dtype,
                attn_implementation=SERVED,
                device_map=direct,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
    problems = [
        f"{kind}: {listed(report[f'{kind}_keys'])}" for kind in ("missing", "unexpected") if _keys(report, kind)
    ]
    if problems:
        raise CheckpointError(f"the weights in {folder} do not fit {source.name}; {'; '.join(problems)}")
    progress(total, total)
    return module.to(device)


def _rope_types(config: PreTrainedConfig) -> list[str]:
    """The rope types of the configuration: one for all layers, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    candidates = [parameters, *(part for part in parameters.values() if isinstance(part, Mapping))]
    return [str(part["rope_type"]) for part in candidates if "rope_type" in part]


@contextmanager
def _progress_bar(progress: Callable[[int, int], None], total: int) -> Iterator[None]:
    """Turns transformers' progress bar into calls of `progress`, in proportion to the tensors loaded."""

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") == LOADING and args:
            return counted(list(args[0]))
        return factory(*args, **kwargs)

    def counted(items: list[Any]) -> Iterator[Any]:
        for done, item in enumerate(items):
            progress(total * done // len(items), total)
            yield item

    previous = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)


def _keys(report: Mapping[str, Any], kind: str) -> list[str]:
    return [name for name in report[f"{kind}_keys"] if not name.endswith("rotary_emb.inv_freq")]
