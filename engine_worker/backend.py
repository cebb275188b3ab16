"""Chooses the backend that computes a model, torch or OpenVINO, and records the reason."""

from importlib import import_module

from engine_worker.runner.config import DraftConfig, RunnerConfig, find_device
from engine_worker.runner.extensions import NO_EXTENSIONS, Extensions
from engine_worker.runner.load import Warn
from engine_worker.runner.load import load_runner as load_torch
from engine_worker.runner.runner import ModelRunner
from engine_worker.runner.weights import Progress
from sluice.ring.checkpoint import Checkpoint
from sluice.ring.draft_model import check_draft_model
from sluice.settings import backend


def load_runner(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    capturing: Progress,
    warn: Warn,
    draft: DraftConfig | None = None,
    extensions: Extensions = NO_EXTENSIONS,
) -> ModelRunner:
    """A runner on the backend that the settings select; see `engine_worker.runner.load.load_runner`.

    Raises CheckpointError if the draft model does not fit the model, and ValueError if a setting requires OpenVINO and
    OpenVINO cannot serve the model.
    """
    if draft is not None:
        check_draft_model(checkpoint, draft.checkpoint)
    runner = _load(checkpoint, config, progress, capturing, warn, draft, extensions)
    if runner.choices["device"] == "cpu":
        # The import compiles a kernel, for which the first step would otherwise wait.
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
    setting = requires_openvino(config)
    if setting is not None:
        check_openvino(config, setting)
        return _selected(checkpoint, config, progress, warn, draft, extensions, setting)
    reason = "selected by the setting"
    if config.backend == "auto":
        try:
            return _by_openvino(checkpoint, config, progress, warn, draft, extensions, "the default on a CPU")
        except _NoOpenVinoError as error:
            reason = str(error)
    runner = load_torch(
        checkpoint, config, progress, capturing=capturing, warn=warn, draft=draft, extensions=extensions
    )
    runner.choices |= {"backend": "torch", "backend_reason": reason}
    return runner


def requires_openvino(config: RunnerConfig) -> str | None:
    """The setting that requires OpenVINO, as `name = value`; None if no setting does. Raises ValueError if settings
    contradict each other."""
    return backend.requires_openvino(config, find_device(config).type)


def check_openvino(config: RunnerConfig, required_by: str, ranks: int = 1) -> None:
    """Raises ValueError on settings that OpenVINO does not support. `required_by`: from `requires_openvino`."""
    for setting, reason in _unsupported(config, ranks):
        raise ValueError(f"{setting} contradicts {required_by}: OpenVINO {reason}")


def _unsupported(config: RunnerConfig, ranks: int = 1) -> list[tuple[str, str]]:
    """Settings that OpenVINO does not support, each with the reason."""
    return backend.unsupported_by_openvino(
        config,
        find_device(config).type,
        tokens_per_block=config.tokens_per_block,
        ranks=ranks,
    )


class _NoOpenVinoError(Exception):
    """OpenVINO cannot serve this model with these settings; the message says why."""


def _by_openvino(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    warn: Warn,
    draft: DraftConfig | None,
    extensions: Extensions,
    reason: str,
) -> ModelRunner:
    """`reason`: why OpenVINO is chosen. Raises _NoOpenVinoError, before the weights are read."""
    for setting, unsupported in _unsupported(config):
        raise _NoOpenVinoError(f"{setting}; OpenVINO {unsupported}")
    try:
        from engine_worker.openvino.load import RefusedError, load_openvino
    except ImportError as error:
        raise _NoOpenVinoError(f"the package openvino is not installed ({error})") from error
    try:
        runner = load_openvino(checkpoint, config, progress, warn, draft, extensions)
    except RefusedError as error:
        raise _NoOpenVinoError(f"OpenVINO cannot serve this model here: {error}") from error
    runner.choices["backend_reason"] = f"{reason}; {runner.choices['backend_reason']}"
    return runner


def _selected(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    warn: Warn,
    draft: DraftConfig | None,
    extensions: Extensions,
    setting: str,
) -> ModelRunner:
    """`setting`: from `requires_openvino`. Raises ValueError."""
    try:
        return _by_openvino(checkpoint, config, progress, warn, draft, extensions, f"selected by the setting {setting}")
    except _NoOpenVinoError as error:
        raise ValueError(f"{setting} cannot be used: {error}") from error
