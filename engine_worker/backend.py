"""Chooses what computes a model, and says why."""

from importlib import import_module

from engine_worker.runner.config import DraftConfig, RunnerConfig, find_device
from engine_worker.runner.extensions import NO_EXTENSIONS, Extensions
from engine_worker.runner.load import Warn
from engine_worker.runner.load import load_runner as load_torch
from engine_worker.runner.runner import ModelRunner
from engine_worker.runner.weights import Progress
from sluice.ring.checkpoint import Checkpoint
from sluice.ring.draft_model import check_draft_model

TOKENS_PER_BLOCK = 32
"""Of OpenVINO's attention."""


def load_runner(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    capturing: Progress,
    warn: Warn,
    draft: DraftConfig | None = None,
    extensions: Extensions = NO_EXTENSIONS,
) -> ModelRunner:
    """A runner on the backend of the settings; see `engine_worker.runner.load.load_runner`.

    Raises CheckpointError if the draft model does not fit the model, and ValueError, with the reason, if OpenVINO
    cannot run, and is wanted by name or for what only it can.
    """
    if draft is not None:
        check_draft_model(checkpoint, draft.checkpoint)
    runner = _load(checkpoint, config, progress, capturing, warn, draft, extensions)
    if runner.choices["device"] == "cpu":
        # Compiles its kernel, so that no step waits for that.
        import_module("engine_worker.sampling.cpu_logprobs")
    if draft is not None:
        runner.choices["draft_model"] = draft.checkpoint.name
    return runner


def _load(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    capturing: Progress,
    warn: Warn,
    draft: DraftConfig | None,
    extensions: Extensions,
) -> ModelRunner:
    wish = wants_openvino(config)
    if wish is not None:
        check_openvino(config, wish)
        return _selected(checkpoint, config, progress, draft, extensions, wish)
    reason = "selected by the setting"
    if config.backend == "auto":
        try:
            return _by_openvino(checkpoint, config, progress, draft, extensions, "the default on a CPU")
        except _NoOpenVinoError as error:
            reason = str(error)
    runner = load_torch(
        checkpoint, config, progress, capturing=capturing, warn=warn, draft=draft, extensions=extensions
    )
    runner.choices |= {"backend": "torch", "backend_reason": reason}
    return runner


def wants_openvino(config: RunnerConfig) -> str | None:
    """The setting that wants it; None: none does. Raises ValueError if settings contradict each other."""
    only_there = [
        f"{name} = {value}"
        for name, value, off in (
            ("quantize", config.quantize, "none"),
            ("kv_precision", config.kv_precision, "auto"),
            ("weights_folder", config.weights_folder, None),
        )
        if value != off
    ]
    if config.dtype == "bfloat16" and config.backend != "torch" and find_device(config).type == "cpu":
        only_there.append("dtype = bfloat16")
    if config.backend == "openvino":
        return "backend = openvino"
    if config.backend == "torch" and only_there:
        raise ValueError(f"{only_there[0]} needs backend = openvino, not torch")
    return only_there[0] if only_there else None


def check_openvino(config: RunnerConfig, wish: str, ranks: int = 1) -> None:
    """Raises ValueError on settings that OpenVINO cannot follow. `wish`: from `wants_openvino`."""
    for setting, limit in _contradictions(config, ranks):
        raise ValueError(f"{setting} contradicts {wish}: OpenVINO {limit}")


def _contradictions(config: RunnerConfig, ranks: int = 1) -> list[tuple[str, str]]:
    """Settings that OpenVINO cannot follow, each with the reason."""
    device = find_device(config).type
    return [
        (f"{name} = {value}", limit)
        for name, value, good, limit in (
            ("lora", config.lora, not config.lora, "has no adapters in its graphs"),
            ("tensor_parallel", ranks, ranks == 1, "runs in one process"),
            ("device", device, device == "cpu", "computes on a CPU"),
            ("dtype", config.dtype, config.dtype != "float16", "computes in float32 or bfloat16"),
            ("attention", config.attention, config.attention == "auto", "has an attention of its own"),
            (
                "tokens_per_block",
                config.tokens_per_block,
                config.tokens_per_block in (0, TOKENS_PER_BLOCK),
                f"has blocks of {TOKENS_PER_BLOCK} tokens",
            ),
        )
        if not good
    ]


class _NoOpenVinoError(Exception):
    """OpenVINO cannot serve this model with these settings; the message says why."""


def _by_openvino(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    draft: DraftConfig | None,
    extensions: Extensions,
    reason: str,
) -> ModelRunner:
    """Raises _NoOpenVinoError before the weights are read."""
    for setting, limit in _contradictions(config):
        raise _NoOpenVinoError(f"{setting}; OpenVINO {limit}")
    try:
        from engine_worker.openvino.load import RefusedError, load_openvino
    except ImportError as error:
        raise _NoOpenVinoError(f"the package openvino is not installed ({error})") from error
    try:
        runner = load_openvino(checkpoint, config, progress, draft, extensions)
    except RefusedError as error:
        raise _NoOpenVinoError(f"OpenVINO cannot serve this model here: {error}") from error
    runner.choices["backend_reason"] = f"{reason}; {runner.choices['backend_reason']}"
    return runner


def _selected(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    draft: DraftConfig | None,
    extensions: Extensions,
    wish: str,
) -> ModelRunner:
    try:
        return _by_openvino(checkpoint, config, progress, draft, extensions, f"selected by the setting {wish}")
    except _NoOpenVinoError as error:
        raise ValueError(f"{wish} cannot be followed: {error}") from error
