"""Which settings need OpenVINO, and which OpenVINO does not support.

The launcher checks this before it starts a process; the engine checks it again when it knows its device.
"""

from typing import Final

from sluice.settings.engine import Compute

OPENVINO_BLOCK: Final = 32
"""Block size of OpenVINO's attention, the only one that its CPU plugin supports."""
SMALLEST_BLOCK: Final = 16
"""Smallest block size that other attention backends choose by themselves. Small blocks waste little memory at a
sequence's end, and let requests share more of a common prefix."""


def requires_openvino(config: Compute, device: str) -> str | None:
    """The setting that requires OpenVINO, as `name = value`; None if no setting does. `device`: cpu, cuda, or auto if
    it is not known. Raises ValueError if settings contradict each other."""
    required_by = [
        f"{name} = {value}"
        for name, value, off in (
            ("quantize", config.quantize, "none"),
            ("kv_precision", config.kv_precision, "auto"),
            ("weights_folder", config.weights_folder, None),
        )
        if value != off
    ]
    if config.dtype == "bfloat16" and config.backend != "torch" and device == "cpu":
        required_by.append("dtype = bfloat16")
    if config.backend == "openvino":
        return "backend = openvino"
    if config.backend == "torch" and required_by:
        raise ValueError(f"{required_by[0]} needs backend = openvino, not torch")
    return required_by[0] if required_by else None


def unsupported_by_openvino(
    config: Compute, device: str, *, tokens_per_block: int, ranks: int
) -> list[tuple[str, str]]:
    """Settings, as `name = value`, that OpenVINO does not support, each with the reason. `device`: see
    `requires_openvino`."""
    return [
        (f"{name} = {value}", reason)
        for name, value, supported, reason in (
            ("tensor_parallel", ranks, ranks == 1, "runs in one process"),
            ("device", device, device != "cuda", "computes on a CPU"),
            ("dtype", config.dtype, config.dtype != "float16", "computes in float32 or bfloat16"),
            ("attention", config.attention, config.attention == "auto", "has its own attention"),
            (
                "tokens_per_block",
                tokens_per_block,
                tokens_per_block in (0, OPENVINO_BLOCK),
                f"has blocks of {OPENVINO_BLOCK} tokens",
            ),
        )
        if not supported
    ]
