"""The errors of guided decoding, and which guides are known to be too complex."""

import signal
from collections import OrderedDict

from engine_worker.guided.messages import Key
from sluice.settings.engine import GuideLimits
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.params import Guide

MAX_REFUSED = 256
"""Guides that are remembered as too complex."""


class RefusedGuides:
    """The latest guides that turned out to be too complex: new requests with them are refused without another trial.

    Used by the engine's thread and the one that computes steps.
    """

    def __init__(self, limits: GuideLimits) -> None:
        self.limits = limits
        self._refused: OrderedDict[Key, Fault] = OrderedDict()

    def refuse(self, key: Key, fault: Fault) -> None:
        self._refused[key] = fault
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def find(self, key: Key) -> Fault | None:
        return self._refused.get(key)


def field_of(guide: Guide) -> str:
    return f"spec.guided.{guide.kind.value}"


def invalid(guide: Guide, message: str) -> Fault:
    return Fault(ErrorCode.INVALID_ARGUMENT.name, message, field_of(guide))


def wrong_tokens(guide: Guide, count: int) -> Fault:
    """The tokens of a resumed stream do not match, from token `count` on. The engine itself samples only those that
    do."""
    return invalid(guide, f"the tokens so far do not match it, from token {count} on")


def unavailable(reason: str) -> Fault:
    return Fault(ErrorCode.NOT_BUILT_YET.name, f"this engine has no guided decoding: {reason}", "spec.guided")


def lost(reason: str) -> Fault:
    return Fault(ErrorCode.INTERNAL.name, f"guided decoding has failed: {reason}")


def too_complex(
    guide: Guide, status: int, limits: GuideLimits, *, compiling: bool = False, reason: str | None = None
) -> Fault:
    """`status`: signal that ended the process that compiled the guide or computed its masks. `reason`: if None, it
    follows from `status`."""
    work = "compiling it" if compiling else "finding its next tokens"
    if reason is None:
        reason = f"{work} {_exceeded(status, limits, compiling=compiling)}"
    return Fault(ErrorCode.GUIDE_TOO_COMPLEX.name, f"is too complex: {reason}", field_of(guide))


def _exceeded(status: int, limits: GuideLimits, *, compiling: bool) -> str:
    if status == signal.SIGPROF:
        seconds = limits.guided_compile_seconds if compiling else limits.guided_mask_seconds
        setting = "guided_compile_seconds" if compiling else "guided_mask_seconds"
        return f"takes more than {seconds:g} s of CPU time ({setting})"
    if status in (signal.SIGSEGV, signal.SIGBUS):
        return "overflows the stack: it is nested too deeply"
    if status == signal.SIGABRT:
        return f"takes more than {limits.guided_memory >> 20} MiB of memory (guided_memory)"
    return "crashes the process that does it"
