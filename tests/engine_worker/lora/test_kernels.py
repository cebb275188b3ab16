import pytest

from tests.engine_worker.triton_tools import CAPABILITIES, machine_code, needs_triton

pytestmark = [pytest.mark.process, pytest.mark.slow]

TYPES = {
    **dict.fromkeys(("x", "out", "arena"), "*bf16"),
    **dict.fromkeys(("tables", "adapters", "spans"), "*i32"),
    **dict.fromkeys(("stride", "page_size", "num_adapters", "max_pages", "num_rows"), "i32"),
    "order": "*i64",
    "sums": "*fp32",
}
SIZES = {"INPUTS": 4096, "RANKS": 8, "WIDTH": 16, "BLOCK": 16, "TILE": 64}


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", ["_shrink", "_expand"])
def test_kernels_compile(name, capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from engine_worker.lora import kernels

    kernel = getattr(kernels, name)
    types = {argument: kind for argument, kind in TYPES.items() if argument in kernel.arg_names}
    assert machine_code(kernel, capability, types, SIZES)
