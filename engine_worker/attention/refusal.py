"""Why a kernel is not used."""

from enum import StrEnum

import torch


class Refusal(StrEnum):
    """In words, after the kernel's title."""

    ABSENT = "is not here"
    """Not installed, or not for this GPU, these heads, this type or blocks of this size: nothing is amiss."""
    FAILED = "failed"
    """It is here, and could not be loaded or raised an error."""
    WRONG = "is wrong"
    """It ran, and does not agree with the reference."""


class RefusedError(Exception):
    """As text: what kind of refusal it is, and the reason."""

    def __init__(self, kind: Refusal, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason
        """One line."""

    @classmethod
    def of(cls, error: Exception) -> "RefusedError":
        """What a foreign package raised."""
        kind = Refusal.ABSENT if isinstance(error, ModuleNotFoundError) else Refusal.FAILED
        return cls(kind, in_a_line(error).rstrip("."))


class BrokenDeviceError(ValueError):
    """A kernel under trial broke the process's CUDA context, so every later kernel would seem to fail as well."""


def check_device(device: torch.device, kernel: str, setting: str, error: Exception) -> None:
    """After a kernel under trial raised this error. An illegal access or a failed assertion stays with the process:
    CUDA answers every later call with it. Raises BrokenDeviceError then, with the kernel and the setting without it."""
    try:
        synchronize(device)
    except Exception as sticky:
        raise BrokenDeviceError(
            f"{kernel} broke the CUDA context of {device} when it was tried out: {in_a_line(error)}. "
            f"This process cannot use the GPU any more; start it with {setting}"
        ) from sticky


def in_a_line(error: Exception) -> str:
    """The first line, for torch's and Triton's compilers say a lot."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on the device; a CPU queues none. Raises RuntimeError where a GPU has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
