import pytest

from engine_worker.layers.coded import TYPES
from tests.engine_worker.triton_tools import CAPABILITIES, machine_code, needs_triton

pytestmark = [pytest.mark.process, pytest.mark.slow]

ARGUMENTS = {
    **dict.fromkeys(("x", "bias", "out"), "*bf16"),
    **dict.fromkeys(("tokens", "outputs", "inputs", "width", "groups", "count", "experts"), "i32"),
    "codes": "*u8",
    "scales": "*fp16",
    "zeros": "*u8",
    "table": "*fp32",
    "chosen": "*i64",
    "ends": "*i32",
    "order": "*i32",
}
FLAGS = {"TYPE": "u4", "PAIRED": True, "ZEROS": True, "BIASED": False, "ORDERED": False, "GROUP": 128, "RUN": 64}
PER_ROW = FLAGS | {"ZEROS": False, "BIASED": True, "GROUP": 0}
KERNELS = [
    ("_product", {**FLAGS, "ROWS": 32, "TOKENS": 16}),
    ("_single", {**FLAGS, "RUNS": 8, "ROWS": 4}),
    ("_decode", {**FLAGS, "CHOSEN": False, "ROWS": 32}),
    ("_decode", {**PER_ROW, "TYPE": "f8e4m3", "PAIRED": False, "CHOSEN": True, "ROWS": 32}),
    ("_product", {**FLAGS, "ROWS": 64, "TOKENS": 128}),
    ("_grouped", {**FLAGS, "EXPERTS": 128, "ROWS": 32, "TOKENS": 16}),
    ("_grouped", {**FLAGS, "ORDERED": True, "EXPERTS": 8, "ROWS": 64, "TOKENS": 128}),
    ("_grouped", {**PER_ROW, "TYPE": "f8e4m3", "PAIRED": False, "EXPERTS": 1, "ROWS": 64, "TOKENS": 64}),
    *(
        ("_product", {**PER_ROW, "TYPE": kind, "PAIRED": kind in ("i4", "nf4", "f4e2m1"), "ROWS": 32, "TOKENS": 32})
        for kind in TYPES[1:]
    ),
]


@pytest.mark.quick(3)
@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("name", "constants"), KERNELS, ids=[f"{k[0]}{i}" for i, k in enumerate(KERNELS)])
def test_kernels_compile(name, constants, capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from engine_worker.layers import coded_kernels

    assert machine_code(getattr(coded_kernels, name), capability, ARGUMENTS, constants)
