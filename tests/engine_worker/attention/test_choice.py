import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen
from torch.torch_version import TorchVersion

from engine_worker.attention import backend, choice
from engine_worker.attention.backend import BrokenDeviceError, HeadShape, Refusal, RefusedError, Site
from engine_worker.attention.cache import store_by_torch
from engine_worker.attention.choice import ChosenBackend, choose
from engine_worker.attention.paged import Kernel
from tests.engine_worker.attention import flash_fakes

CPU = torch.device("cpu")
HEADS = HeadShape(4, 2, 16)
HOPPER = Site(CPU, (9, 0), torch.bfloat16, HEADS, (None, 30), 0)
"""The device is a CPU; only the reported compute capability is that of a GPU."""
AMPERE = dataclasses.replace(HOPPER, capability=(8, 0))


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """No kernel is installed until a test adds one, and torch is 2.11. Returns the monkeypatch."""
    for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute", "engine_worker.attention.kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    has_torch(monkeypatch, "2.11.0")
    return monkeypatch


def has_torch(monkeypatch, version: str) -> None:
    major, minor, _ = version.split(".")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch_varlen, "varlen_attn", flash_fakes.varlen((int(major), int(minor))))


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


def test_every_kernel_is_a_setting():
    from sluice.settings.engine import Compute

    names = {kernel.name for kernel in choice.KERNELS} | {"auto", "reference", "cpu"}
    assert set(Compute.__annotations__["attention"].__args__) == names


def with_store(function) -> ModuleType:
    """A stand-in for `engine_worker.attention.kernels` that has only `store`."""
    module = ModuleType("kernels")
    module.store = function
    return module


def with_attend() -> ModuleType:
    """A stand-in for `engine_worker.attention.kernels` whose functions use torch."""
    module = with_store(store_by_torch)

    def attend(query, cache, inputs, scale, window):
        starts, lengths = inputs.query_start.tolist(), inputs.context_lengths.tolist()
        bounds = (-1, 0) if window is None else (window - 1, 0)
        return flash_fakes.paged(query, cache.keys, cache.values, inputs.block_tables, starts, lengths, scale, bounds)

    module.attend = attend
    return module


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
