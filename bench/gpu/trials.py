"""Tries each kernel in a separate process, so that a kernel that crashes or breaks the CUDA context affects no other.

python -m bench.gpu.trials WORK: tries one in this process and reports each place, when it begins and how it ended.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import torch

from bench.gpu.children import Children, Reports, read_work, report
from bench.gpu.findings import RUNS, Tried
from bench.gpu.scale import Scale
from engine_worker.attention.backend import HeadShape, Refusal, RefusedError, Site, capability_of
from engine_worker.attention.choice import KERNELS, try_kernel
from engine_worker.attention.cpu import CpuAttention
from engine_worker.attention.paged import Kernel, triton_store
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.attention.trial import WINDOW, verify_backend, verify_store
from engine_worker.runner.fusing import triton_kernels, verify_layers, verify_sampling

PAGE = 16
STORE, LAYERS = "Triton's store", "fused layers and sampling"
FUSED = frozenset({STORE, LAYERS})
"""Disabled by `fused_kernels` = false."""


class TrialPlace(NamedTuple):
    heads: HeadShape
    hidden_size: int
    windowed: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (None, WINDOW) if self.windowed else (None,)

    def __str__(self) -> str:
        heads, window = self.heads, "with a window" if self.windowed else "no window"
        return f"{heads.num_heads} heads over {heads.num_kv_heads} of {heads.head_dim}, {window}"


Trial = Callable[[TrialPlace], None]
"""Raises RefusedError if the kernel is not installed, does not support this place, or computes wrong results.
Exceptions of the kernel itself pass through."""


def subjects() -> Mapping[str, Trial]:
    """By title, in the order in which an engine depends on them."""
    attention = {kernel.title: _paged(kernel) for kernel in KERNELS}
    return {STORE: _store, LAYERS: _fused, **attention, "cpu": _cpu}


def _paged(kernel: Kernel) -> Trial:
    def trial(place: TrialPlace) -> None:
        try_kernel(kernel, _site(place))

    return trial


def _site(place: TrialPlace) -> Site:
    capability = capability_of(place.device)
    return Site(place.device, capability, place.dtype, place.heads, place.windows, 0, fused=False)


def _cpu(place: TrialPlace) -> None:
    backend = CpuAttention(place.heads, place.windows)
    verify_backend(backend, _site(place), PAGE)


def _store(place: TrialPlace) -> None:
    verify_store(triton_store(), _site(place))


def _fused(place: TrialPlace) -> None:
    kernels, sampling = triton_kernels(place.device)
    verify_sampling(sampling, place.device)
    verify_layers(kernels, place.hidden_size, place.heads, place.dtype, place.device)


def main() -> None:
    work = read_work()
    trial = subjects()[work["title"]]
    device, dtype = torch.device(work["device"]), getattr(torch, work["dtype"])
    for heads, hidden_size, windowed in work["places"]:
        place = TrialPlace(HeadShape(*heads), hidden_size, windowed, dtype, device)
        # If the process dies during the trial, the parent knows at which place.
        report(begun=str(place))
        report(place=str(place), **run(trial, place, work["rounds"]))


@torch.inference_mode()
def run(trial: Trial, place: TrialPlace, rounds: int) -> dict[str, str | float | int]:
    seconds: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        try:
            trial(place)
        except Exception as error:  # noqa: BLE001 - a foreign package may raise anything, and this is the result
            refused = error if isinstance(error, RefusedError) else RefusedError.of(error)
            return {"ended": str(refused), "absent": refused.kind is Refusal.ABSENT}
        seconds.append(time.perf_counter() - began)
    return {"ended": RUNS, "absent": False, "first": seconds[0], "fastest": min(seconds)}


ROUNDS = 20
"""Rounds per kind of heads, since an illegal access may not fail immediately."""


def places(scale: Scale, dtype: torch.dtype, device: torch.device) -> list[TrialPlace]:
    size = int(scale.small.config["hidden_size"])
    return [TrialPlace(heads, size, windowed, dtype, device) for windowed in (False, True) for heads in scale.heads]


def try_in_child(title: str, given: Sequence[TrialPlace], children: Children, seconds: float) -> list[Tried]:
    needed = "cpu" if title == CpuAttention.name else "cuda"
    if given[0].device.type != needed:
        return [Tried(title, "all", f"is not available: it needs a {needed.upper()} device", absent=True)]
    work = {
        "title": title,
        "rounds": ROUNDS,
        "device": str(given[0].device),
        "dtype": str(given[0].dtype).removeprefix("torch."),
        "places": [(astuple(one.heads), one.hidden_size, one.windowed) for one in given],
    }
    return judge(title, *children.run_module([__name__, json.dumps(work)], seconds))


def judge(title: str, reports: Reports, why: str) -> list[Tried]:
    found, begun = [], "its start"
    for one in reports:
        if "begun" in one:
            begun = one["begun"]
        else:
            found.append(Tried(title, **one))
            begun = "its end"
    if why:
        found.append(Tried(title, begun, f"its process {why}", crashed=True))
    reasons = {one.ended for one in found}
    if len(reasons) == 1 and all(one.absent for one in found):
        return [Tried(title, "all", reasons.pop(), absent=True)]
    return found


def avoiding(tried: Iterable[Tried]) -> dict[str, Any]:
    tried = list(tried)
    crashed = {one.kernel for one in tried if one.crashed}
    names = {kernel.name for kernel in KERNELS if kernel.title in crashed}
    options: dict[str, Any] = {"fused_kernels": False} if crashed & FUSED else {}
    if names:
        sound = {one.kernel for one in tried} - {one.kernel for one in tried if one.ended != RUNS}
        left = (kernel.name for kernel in KERNELS if kernel.title in sound and kernel.name not in names)
        options["attention"] = next(left, ReferenceAttention.name)
    return options


if __name__ == "__main__":
    main()
