"""Installed kernels that fail, are wrong or break the device in their trial."""

import dataclasses
import sys

import pytest
import torch

from engine_worker.attention import backend, choice
from engine_worker.attention.backend import BrokenDeviceError, Refusal, RefusedError, Site
from engine_worker.attention.cache import store_by_torch
from engine_worker.attention.choice import choose
from engine_worker.attention.paged import Kernel
from tests.engine_worker.attention import flash_fakes
from tests.engine_worker.attention.fake_installs import AMPERE, HOPPER, with_attend, with_store

pytestmark = pytest.mark.usefixtures("installed")


@pytest.mark.parametrize("name", ["flash_attn_varlen_func", "flash_attn_with_kvcache"])
@pytest.mark.parametrize("windows", [(None,), (None, 30)])
def test_a_kernel_with_wrong_results_is_not_used(installed, name, windows):
    """The trial covers a generation step, a step with context, and windows if the model has any."""
    module, site = flash_fakes.flash2(), dataclasses.replace(HOPPER, windows=windows)
    right = getattr(module, name)
    installed.setitem(sys.modules, "flash_attn", module)
    for wrong, detected in ((_with_nan(right), True), (_windowless(right), len(windows) > 1)):
        setattr(module, name, wrong)
        chosen = choose("auto", site)
        assert chosen.backend.name == ("reference" if detected else "flash")
        assert ("FlashAttention-2 is wrong: off by" in chosen.reason) == detected


def test_a_kernel_that_fails_is_not_used(installed):
    module = flash_fakes.flash2()
    module.flash_attn_varlen_func = _no_image
    installed.setitem(sys.modules, "flash_attn", module)
    chosen = choose("auto", HOPPER)
    assert "FlashAttention-2 failed: CUDA error: no kernel image is available." in chosen.reason


def test_flash_attention_2_is_absent_where_only_4_is_installed(installed, tmp_path):
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    installed.delitem(sys.modules, "flash_attn")
    installed.syspath_prepend(tmp_path)
    with pytest.raises(RefusedError, match="contains only FlashAttention-4") as caught:
        choice.try_kernel(_flash2(), AMPERE)
    installed.delitem(sys.modules, "flash_attn")
    assert caught.value.kind is Refusal.ABSENT


def _flash2() -> Kernel:
    return next(kernel for kernel in choice.KERNELS if kernel.title == "FlashAttention-2")


def test_kinds_of_refusal(installed):

    def refused(site: Site = AMPERE) -> Refusal:
        with pytest.raises(RefusedError) as caught:
            choice.try_kernel(_flash2(), site)
        return caught.value.kind

    assert refused() is Refusal.ABSENT
    module = flash_fakes.flash2()
    installed.setitem(sys.modules, "flash_attn", module)
    assert refused(dataclasses.replace(AMPERE, dtype=torch.float32)) is Refusal.ABSENT
    assert refused(dataclasses.replace(AMPERE, tokens_per_block=32)) is Refusal.ABSENT
    module.flash_attn_varlen_func = _with_nan(module.flash_attn_varlen_func)
    assert refused() is Refusal.WRONG
    module.flash_attn_varlen_func = _no_image
    assert refused() is Refusal.FAILED
    del module.flash_attn_varlen_func
    assert refused() is Refusal.FAILED


def _no_compiler(*args):
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")


def _padding_to_the_first(cache, key, value, slots):
    cache.store(key, value, slots.clamp(min=0))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "is not available: "),
        (with_store(_no_compiler), "failed: Failed to find C compiler"),
        (with_store(_padding_to_the_first), "is wrong: "),
    ],
)
def test_without_tritons_store_torch_stores(installed, module, reason):
    """The kernel is still used for attention, and still captured in graphs."""
    installed.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    installed.setitem(sys.modules, "engine_worker.attention.kernels", module)
    chosen = choose("flash", AMPERE)
    assert f"Triton's store {reason}" in chosen.reason
    assert chosen.backend.graphs


def _with_nan(function):
    return lambda *args, **options: function(*args, **options) + torch.tensor([0.0] * 15 + [torch.nan])


def _windowless(function):
    return lambda *args, **options: function(*args, **{**options, "window_size": (-1, -1)})


def _no_image(*args, **options):
    raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")


def _sticky(device):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")


def test_a_kernel_that_breaks_the_cuda_context_fails_the_start_with_its_name_and_a_setting(installed):
    """Every kernel tested afterwards would fail too, and the reference would be chosen although others work."""
    module = flash_fakes.flash2()
    module.flash_attn_varlen_func = _no_image
    installed.setitem(sys.modules, "flash_attn", module)
    installed.setitem(sys.modules, "engine_worker.attention.kernels", with_store(store_by_torch))
    installed.setattr(backend, "synchronize", _sticky)
    with pytest.raises(BrokenDeviceError, match=r"FlashAttention-2 broke .* no kernel image .* attention = triton"):
        choose("auto", HOPPER)


def test_a_store_that_breaks_the_cuda_context_fails_the_start_with_a_setting(installed):
    installed.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    installed.setitem(sys.modules, "engine_worker.attention.kernels", with_store(_no_compiler))
    installed.setattr(backend, "synchronize", _sticky)
    with pytest.raises(BrokenDeviceError, match=r"Triton's store broke .* fused_kernels = false"):
        choose("flash", AMPERE)


def _wrong_in_graphs(attend):
    def wrong(query, cache, inputs, scale, window):
        return attend(query, cache, inputs, scale, window) + 0.5 * inputs.captured_context

    return wrong


def _fails_in_graphs(attend):
    def failing(query, cache, inputs, scale, window):
        return _no_compiler() if inputs.captured_context else attend(query, cache, inputs, scale, window)

    return failing


@pytest.mark.parametrize(
    ("changed", "reason"),
    [(_wrong_in_graphs, "is wrong: off by 0.5"), (_fails_in_graphs, "failed: Failed to find C")],
)
def test_a_kernel_that_fails_only_in_graphs_with_context_is_used_without_them(installed, changed, reason):
    module = with_attend()
    installed.setitem(sys.modules, "engine_worker.attention.kernels", module)
    chosen = choose("triton", HOPPER)
    assert chosen.backend.context_graphs
    assert "graphs" not in chosen.reason
    module.attend = changed(module.attend)
    chosen = choose("triton", HOPPER)
    assert chosen.backend.name == "triton"
    assert chosen.backend.graphs
    assert not chosen.backend.context_graphs
    assert f"No CUDA graphs of steps with context: in their test the kernel {reason}" in chosen.reason


def test_without_fused_kernels_tritons_store_is_not_tried(installed):
    installed.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    installed.setitem(sys.modules, "engine_worker.attention.kernels", with_store(_padding_to_the_first))
    chosen = choose("flash", dataclasses.replace(AMPERE, fused=False))
    assert "Triton's store is not used: fused_kernels = false" in chosen.reason
