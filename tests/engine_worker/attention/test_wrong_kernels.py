"""The comparison in `on_device` detects wrong backends."""

import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen
from torch.torch_version import TorchVersion

from engine_worker.attention.backend import HeadShape, Refusal, RefusedError
from engine_worker.attention.choice import KERNELS
from engine_worker.attention.paged import Kernel
from engine_worker.attention.reference import ReferenceAttention
from tests.engine_worker.attention import flash_fakes, on_device
from tests.engine_worker.attention.on_device import BACKENDS, ON_GPU, by_kernel
from tests.engine_worker.attention.paged import CPU

SMALL = (HeadShape(4, 2, 16),)


class Wrong(ReferenceAttention):
    """The reference with one defect."""

    def __init__(self, heads: HeadShape, defect: str) -> None:
        super().__init__(heads)
        self._defect = defect

    def attend(self, query, key, value, cache, inputs, window=None):
        if self._defect == "window":
            window = None if window is None else window + 1
        if self._defect == "padding":
            cache.keys[-1] += 1
        out = super().attend(query, key, value, cache, inputs, window)
        if self._defect == "nan":
            out[0, 0, 0] = torch.nan
        return out


def check(make) -> str:
    return on_device.check(make, torch.float32, CPU, SMALL)


def test_the_reference_agrees_with_itself():
    assert check(lambda heads, windowed, size: ReferenceAttention(heads)).startswith("16 steps, off by 0.00")


@pytest.mark.parametrize(
    ("defect", "message"), [("window", "off by"), ("padding", "not in their slots"), ("nan", "off by inf")]
)
def test_a_wrong_backend_is_detected(defect, message):
    with pytest.raises(AssertionError, match=message):
        check(lambda heads, windowed, size: Wrong(heads, defect))


def test_a_backend_without_windows_is_checked_without_windows():
    def make(heads, windowed, size):
        if windowed:
            raise RefusedError(Refusal.ABSENT, "it does not support windows")
        return Wrong(heads, "window")

    assert check(make).startswith("8 steps")
    assert check(make).endswith("; it does not support windows")


@pytest.mark.skipif(ON_GPU, reason="the kernels support this machine")
@pytest.mark.parametrize("title", [title for title in BACKENDS if title != "cpu"])
def test_a_backend_for_other_machines_is_skipped_with_the_reason(title):
    with pytest.raises(pytest.skip.Exception, match="CUDA device"):
        check(BACKENDS[title])


def kernel(load, **limits):
    options = {"dtypes": (torch.float32,), "tokens_per_block": 1} | limits
    return Kernel("this", "This", load, frozenset({9}), **options)


def zeros(query, *_):
    return torch.zeros_like(query)


def broken(*_):
    raise RuntimeError("it does not compile\nfor many reasons")


def raising(error):
    def load():
        raise error

    return load


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Every site reports compute capability 9.0."""
    monkeypatch.setattr(on_device, "capability_of", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("absent", "why"),
    [
        (kernel(raising(ModuleNotFoundError("No module named 'this'"))), "No module named 'this'"),
        (kernel(lambda: zeros, dtypes=(torch.bfloat16,)), "does not support float32"),
        (kernel(lambda: zeros, head_dims=range(8)), "heads of dimension 16"),
    ],
)
def test_a_kernel_that_is_not_available_is_skipped(on_a_gpu, absent, why):
    with pytest.raises(pytest.skip.Exception, match=why):
        check(by_kernel(absent, CPU, torch.float32))


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (raising(ImportError("undefined symbol")), "failed: undefined symbol"),
        (lambda: broken, "failed: it does not compile"),
        (lambda: zeros, "is wrong: off by"),
    ],
)
def test_a_kernel_that_is_available_but_fails_is_not_skipped(on_a_gpu, load, why):
    with pytest.raises(RefusedError, match=why):
        check(by_kernel(kernel(load), CPU, torch.float32))


@pytest.fixture
def all_kernels(monkeypatch):
    """Fakes of all kernels, with torch 2.13."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_fakes.flash3())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", flash_fakes.flash4())
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    monkeypatch.setattr(torch_varlen, "varlen_attn", flash_fakes.varlen((2, 13)))
    monkeypatch.setattr(on_device, "PAGES", (256,))


@pytest.mark.quick(2)
@pytest.mark.slow
@pytest.mark.parametrize("title", ["FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "torch's varlen_attn"])
def test_every_kernel_accepts_the_random_steps(all_kernels, on_a_gpu, title):
    """Also with heads of 256 and empty sequences. FlashAttention-2 packs grouped heads of single tokens, for which it
    needs as many tokens as sequences."""
    kernel = next(replace(kernel, majors=frozenset({9})) for kernel in KERNELS if kernel.title == title)
    summary = on_device.check(by_kernel(kernel, CPU, torch.bfloat16), torch.bfloat16, CPU, (HeadShape(2, 1, 256),))
    assert summary.startswith("16 steps")


def test_generation_steps_are_padded_like_those_of_graphs():
    random_steps = list(on_device.steps(SMALL[0], 16, torch.float32, CPU))
    generation = [step.inputs for step in random_steps if step.inputs.max_query == 1]
    assert {bool((inputs.context_lengths == 0).any()) for inputs in generation} == {False, True}
    assert all(len(inputs.slots) == len(inputs.context_lengths) for inputs in generation)
