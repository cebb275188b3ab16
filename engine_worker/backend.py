"""Chooses the backend that computes a model, torch or OpenVINO, and records the reason."""

from collections.abc import Sequence
from importlib import import_module

from engine_worker.runner import servable
from engine_worker.runner.config import DraftConfig, RunnerConfig, find_device
from engine_worker.runner.extensions import NO_EXTENSIONS, Extensions
from engine_worker.runner.load import load_runner as load_torch
from engine_worker.runner.runner import ModelRunner
from engine_worker.runner.weights import Progress
from engine_worker.sampling.processors import Warn
from sluice.checkpoint.folder import Checkpoint
from sluice.checkpoint.servable import check_draft_model
from sluice.settings import engine as engine_settings


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

    Call `check_servable` first. Raises ValueError if a setting requires OpenVINO and OpenVINO cannot serve the model.
    """
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
    setting, reason = requires_openvino(config), "selected by the setting"
    if setting is not None:
        check_openvino(config, setting)
    if setting is not None or config.backend == "auto":
        chosen = "the default on a CPU" if setting is None else f"selected by the setting {setting}"
        try:
            return _by_openvino(checkpoint, config, progress, warn, draft, extensions, chosen)
        except _NoOpenVinoError as error:
            if setting is not None:
                raise ValueError(f"{setting} cannot be used: {error}") from error
            reason = str(error)
    runner = load_torch(
        checkpoint, config, progress, capturing=capturing, warn=warn, draft=draft, extensions=extensions
    )
    runner.choices |= {"backend": "torch", "backend_reason": reason}
    return runner


def check_servable(
    checkpoint: Checkpoint, config: RunnerConfig, ranks: int = 1, draft: Checkpoint | None = None
) -> None:
    """Check what can be checked before the weights are read or downloaded. Raises CheckpointError on a model that is
    not supported, and ValueError on settings that contradict each other or do not fit the model or the memory."""
    setting = requires_openvino(config)
    if setting is not None:
        check_openvino(config, setting, ranks)
    models = [checkpoint]
    if draft is not None:
        check_draft_model(checkpoint, draft)
        models.append(draft)
    servable.check_servable(models, config, ranks, by_openvino=setting is not None)
    if setting is not None:
        _check_openvino_models(models, config, setting)


def requires_openvino(config: RunnerConfig) -> str | None:
    """The setting that requires OpenVINO, as `name = value`; None if no setting does. Raises ValueError if settings
    contradict each other."""
    return engine_settings.requires_openvino(config, find_device(config).type)


def check_openvino(config: RunnerConfig, required_by: str, ranks: int = 1) -> None:
    """Raises ValueError on settings that OpenVINO does not support. `required_by`: from `requires_openvino`."""
    for setting, reason in _unsupported(config, ranks):
        raise ValueError(f"{setting} contradicts {required_by}: OpenVINO {reason}")


def _unsupported(config: RunnerConfig, ranks: int = 1) -> list[tuple[str, str]]:
    """Settings that OpenVINO does not support, each with the reason."""
    return engine_settings.unsupported_by_openvino(
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
        from engine_worker.openvino.load import load_openvino
        from engine_worker.openvino.trial import RefusedError
    except ImportError as error:
        raise _NoOpenVinoError(_not_installed(error)) from error
    try:
        runner = load_openvino(checkpoint, config, progress, warn, draft, extensions)
    except RefusedError as error:
        raise _NoOpenVinoError(f"OpenVINO cannot serve this model here: {error}") from error
    runner.choices["backend_reason"] = f"{reason}; {runner.choices['backend_reason']}"
    return runner


def _check_openvino_models(models: Sequence[Checkpoint], config: RunnerConfig, setting: str) -> None:
    """`setting`: from `requires_openvino`. Raises ValueError."""
    try:
        from engine_worker.openvino.load import check_servable
        from engine_worker.openvino.trial import RefusedError
    except ImportError as error:
        raise ValueError(f"{setting} cannot be used: {_not_installed(error)}") from error
    for model in models:
        try:
            check_servable(model, config)
        except RefusedError as error:
            raise ValueError(f"{setting} cannot be used: OpenVINO cannot serve {model.name} here: {error}") from error


def _not_installed(error: ImportError) -> str:
    return f"the package openvino is not installed ({error})"
