import pytest

from tests.engine_worker.triton_tools import CAPABILITIES, machine_code, needs_triton

pytestmark = [pytest.mark.process, pytest.mark.slow]

BF16 = dict.fromkeys(("x", "update", "weight", "cos", "sin", "out"), "*bf16")
KERNELS = [
    ("_norm", BF16 | {"eps": "fp32"}, {"ADDED": True, "SIZE": 5120, "WIDTH": 8192}),
    ("_norm", BF16 | {"eps": "fp32"}, {"ADDED": False, "SIZE": 4096, "WIDTH": 4096}),
    (
        "_rotate",
        BF16 | {"stride": "i32", "eps": "fp32"},
        {"HEADS": 40, "HEAD_DIM": 128, "DIMS": 128, "GROUP": 8, "NORMED": True},
    ),
    (
        "_rotate",
        BF16 | {"stride": "i32", "eps": "fp32"},
        {"HEADS": 3, "HEAD_DIM": 80, "DIMS": 128, "GROUP": 4, "NORMED": False},
    ),
    ("_gate", BF16, {"SIZE": 12288, "TILE": 1024}),
    ("_product", BF16 | {"inputs": "i32", "outputs": "i32"}, {"ROWS": 1, "TILE": 2048}),
    ("_product", BF16 | {"inputs": "i32", "outputs": "i32"}, {"ROWS": 2, "TILE": 1024}),
]


@pytest.mark.quick(4)
@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("name", "types", "constants"), KERNELS, ids=[f"{k[0]}{i}" for i, k in enumerate(KERNELS)])
def test_kernels_compile(name, types, constants, capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from engine_worker.layers import kernels

    assert machine_code(getattr(kernels, name), capability, types, constants)
