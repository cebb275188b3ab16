"""Which attention kernel is chosen on which device, and the reason that is reported."""

import dataclasses
import sys

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from engine_worker.attention import choice
from engine_worker.attention.backend import HeadShape, Site
from engine_worker.attention.cache import store_by_torch
from engine_worker.attention.choice import ChosenBackend, choose
from tests.engine_worker.attention import flash_fakes
from tests.engine_worker.attention.fake_installs import AMPERE, CPU, HEADS, HOPPER, has_torch, with_attend, with_store

pytestmark = pytest.mark.usefixtures("installed")


def summary(chosen: ChosenBackend) -> tuple[str, int]:
    return chosen.backend.name, chosen.tokens_per_block


def test_choices_on_a_cpu():
    site = Site(CPU, None, torch.float32, HEADS, (None,), 0)
    assert summary(choose("auto", site)) == ("cpu", 16)
    assert summary(choose("cpu", dataclasses.replace(site, tokens_per_block=5))) == ("cpu", 5)
    assert summary(choose("reference", site)) == ("reference", 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_a_cpu_is_refused_except_by_the_reference(dtype):
    site = Site(CPU, None, getattr(torch, dtype), HEADS, (None,), 0)
    for setting in ("auto", "cpu"):
        with pytest.raises(ValueError, match=rf"^dtype = {dtype} is slower than float32 on a CPU, .*dtype = float32"):
            choose(setting, site)
    assert summary(choose("reference", site)) == ("reference", 16)


@pytest.mark.parametrize("name", ["flash", "varlen", "triton"])
def test_kernels_for_gpus_are_refused_on_a_cpu(name):
    with pytest.raises(ValueError, match=f"attention = {name} cannot run here.*needs a CUDA device"):
        choose(name, Site(CPU, None, torch.float32, HEADS, (None,), 0))


def test_the_backend_for_cpus_is_refused_on_a_gpu():
    with pytest.raises(ValueError, match="attention = cpu does not run"):
        choose("cpu", HOPPER)


def test_without_any_kernel_the_reference_is_chosen_and_the_reason_names_each():
    chosen = choose("auto", HOPPER)
    assert summary(chosen) == ("reference", 16)
    for title in ("FlashAttention-3", "FlashAttention-4", "FlashAttention-2", "Triton"):
        assert f"{title} is not available: " in chosen.reason
    assert "torch's varlen_attn is not available: varlen_attn of torch 2.11.0 has no block_table" in chosen.reason


@pytest.mark.parametrize("version", ["2.12.1", "2.13.0"])
def test_with_torch_alone_its_varlen_attn_is_chosen(installed, version):
    has_torch(installed, version)
    chosen = choose("auto", HOPPER)
    assert summary(chosen) == ("varlen", 256)
    assert chosen.reason.startswith("torch's varlen_attn runs here. ")
    assert "FlashAttention-3 is not available: " in chosen.reason


@pytest.mark.parametrize("version", ["2.12.1", "2.13.0"])
@pytest.mark.parametrize(
    ("heads", "windows", "packs"),
    [(HEADS, (None,), True), (HEADS, (None, 30), False), (HeadShape(2, 2, 16), (None,), False)],
)
def test_generation_on_varlen_packs_grouped_heads_without_a_window(installed, version, heads, windows, packs):
    """Where torch cannot pack, it neither splits long contexts nor reads each KV head once: Triton is preferred."""
    has_torch(installed, version)
    calls: list[bool] = []
    major, minor, _ = version.split(".")
    installed.setattr(torch_varlen, "varlen_attn", flash_fakes.varlen((int(major), int(minor)), calls))
    site = dataclasses.replace(HOPPER, heads=heads, windows=windows)
    assert summary(choose("auto", site)) == ("varlen", 256)
    generation_steps, windows_tried = 2, len(set(windows))
    assert calls.count(True) == (generation_steps if heads is HEADS else 0)
    assert len(calls) == 3 * windows_tried
    installed.setitem(sys.modules, "engine_worker.attention.kernels", with_attend())
    assert summary(choose("auto", site)) == (("varlen", 256) if packs else ("triton", 16))


def test_the_most_preferred_installed_kernel_is_chosen(installed):
    has_torch(installed, "2.13.0")
    installed.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    assert summary(choose("auto", HOPPER)) == ("flash", 256)
    assert summary(choose("varlen", HOPPER)) == ("varlen", 256)
    installed.setitem(sys.modules, "flash_attn_interface", flash_fakes.flash3())
    assert summary(choose("auto", HOPPER)) == ("flash", 16)
    installed.setitem(sys.modules, "engine_worker.attention.kernels", with_store(store_by_torch))
    assert choose("flash", HOPPER).reason == "FlashAttention-3 runs here"


def test_kernels_that_do_not_support_the_compute_capability_are_not_chosen(installed):
    installed.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    installed.setitem(sys.modules, "flash_attn_interface", flash_fakes.flash3())
    chosen = choose("auto", AMPERE)
    assert chosen.reason.startswith("FlashAttention-2 runs here. ")
    assert "FlashAttention-3 is not available: it does not support compute capability 8.0" in chosen.reason
    turing = dataclasses.replace(HOPPER, capability=(7, 5))
    assert summary(choose("auto", turing)) == ("reference", 16)


def test_an_unsupported_block_size(installed):
    """With auto the kernel is not chosen; if the setting names the kernel, that is an error."""
    installed.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    small = dataclasses.replace(AMPERE, tokens_per_block=32)
    chosen = choose("auto", small)
    assert summary(chosen) == ("reference", 32)
    assert "tokens_per_block = 32 is not a multiple of 256" in chosen.reason
    with pytest.raises(ValueError, match=r"attention = flash cannot run here.*32 is not a multiple of 256"):
        choose("flash", small)
    assert summary(choose("flash", dataclasses.replace(AMPERE, tokens_per_block=512))) == ("flash", 512)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"dtype": torch.float32}, "float32"), ({"heads": HeadShape(2, 2, 12)}, "heads of dimension 12")],
)
def test_an_unsupported_dtype_or_head_dimension(installed, change, reason):
    installed.setitem(sys.modules, "flash_attn", flash_fakes.flash2())
    with pytest.raises(ValueError, match=reason):
        choose("flash", dataclasses.replace(HOPPER, **change))


def test_every_kernel_is_a_setting():
    from sluice.settings.engine import Compute

    names = {kernel.name for kernel in choice.KERNELS} | {"auto", "reference", "cpu"}
    assert set(Compute.__annotations__["attention"].__args__) == names
