from dataclasses import replace

import pytest
import torch

from engine_worker.attention import trial
from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import store_by_torch
from engine_worker.attention.paged import TRITON, PagedAttention
from tests.engine_worker.attention.paged import attend, paged_step
from tests.engine_worker.triton_tools import needs_triton

pytestmark = [pytest.mark.process, pytest.mark.slow]

LARGE, WIDE, SMALL = HeadShape(32, 8, 128), HeadShape(8, 4, 256), HeadShape(4, 1, 16)
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
SHARED = {80: 163, 90: 227, 120: 99}
"""KiB of shared memory per program, by compute capability."""


class Recorded:
    """Stands in for a kernel and records what Triton's launcher would compile."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel
        self.sources = []

    def __getitem__(self, grid):
        return self._launch

    def _launch(self, *args, num_stages=3, num_warps=4, **constants) -> None:
        from triton.compiler import ASTSource

        signature, divisible = {}, {}
        for i, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=False)):
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = f"*{NAMES[value.dtype]}"
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (not parameter.do_not_specialize and value % 16 == 0):
                divisible[(i,)] = [["tt.divisibility", 16]]
        signature = {p.name: signature.get(p.name, "constexpr") for p in self.kernel.params}
        source = ASTSource(self.kernel, signature, constants, divisible)
        self.sources.append((source, {"num_stages": num_stages, "num_warps": num_warps}))


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """A function that returns (source, options) of each kernel that a step would launch on a small GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from engine_worker.attention import kernels

    monkeypatch.setattr(kernels, "_cores", lambda device: 8)
    recorded = [Recorded(kernels._attend), Recorded(kernels._combine)]
    monkeypatch.setattr(kernels, "_attend", recorded[0])
    monkeypatch.setattr(kernels, "_combine", recorded[1])

    def launch(heads, sequences, window=None):
        for kernel in recorded:
            kernel.sources.clear()
        step = paged_step(heads, sequences, dtype=torch.bfloat16)
        for form in (step, replace(step, inputs=trial.as_captured(step.inputs))):
            attend(PagedAttention(TRITON, heads, store_by_torch), form, window)
        return [source for kernel in recorded for source in kernel.sources]

    return launch


@pytest.mark.quick(2)
@needs_triton
@pytest.mark.parametrize("heads", [LARGE, WIDE], ids=["128", "256"])
@pytest.mark.parametrize(
    "capability", [pytest.param(each, marks=pytest.mark.long) if each == 80 else each for each in SHARED]
)
def test_kernels_compile_and_fit_the_shared_memory(launched, heads, capability, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget

    from engine_worker.attention import kernels

    monkeypatch.setattr(kernels, "_is_roomy", lambda device: capability // 10 in kernels.ROOMY)
    sources = launched(heads, [(8700, 1), (300, 40)])
    compiled = [
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options) for source, options in sources
    ]
    assert len({source.hash() for source, _ in sources}) == 5
    assert max(kernel.metadata.shared for kernel in compiled) <= SHARED[capability] << 10


@needs_triton
@pytest.mark.parametrize("windows", [(None,), (50, 101)])
def test_the_trial_compiles_every_variant_that_serving_launches(launched, windows):
    """The window's size and the numbers of splits and sequences must not specialize a kernel."""

    def variants(steps, windows):
        return {source.hash() for step in steps for window in windows for source, _ in launched(SMALL, step, window)}

    rows = [[(length, 1)] * count for length in (0, 70, 5000) for count in (1, 3, 40)]
    steps = [*rows, *([*generation, (3, 7)] for generation in rows), [(0, 9), (3, 1)]]
    compiled_by_trial = variants(trial.STEPS, (None if windows[0] is None else trial.WINDOW,))
    assert len(compiled_by_trial) == 6
    assert variants(steps, windows) == compiled_by_trial
