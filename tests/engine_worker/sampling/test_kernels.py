import pytest

from tests.engine_worker.triton_tools import CAPABILITIES, machine_code, needs_triton

pytestmark = [pytest.mark.process, pytest.mark.slow]

TYPES = {
    "scores": "*fp32",
    "temperatures": "*fp32",
    "keys": "*i64",
    "thresholds": "*fp32",
    "peaks": "*fp64",
    "tokens": "*i64",
    "stride": "i32",
    "size": "i32",
}


THRESHOLD_TYPES = {
    "scores": "*fp32",
    "temperatures": "*fp32",
    "top_ks": "*i64",
    "top_ps": "*fp64",
    "log_min_ps": "*fp32",
    "thresholds": "*fp32",
    "valid": "*i1",
    "scratch": "*fp32",
    "stride": "i32",
    "size": "i32",
    "has_top_p": "i32",
    "has_min_p": "i32",
}


@pytest.mark.quick(2)
@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("limited", [False, True])
def test_gumbel_max_compiles(capability, limited, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from engine_worker.sampling import kernels

    constants = {**kernels.NOISE, "UNIT": kernels.UNIT, "LIMITED": limited, "WIDTH": kernels.WIDTH}
    assert machine_code(kernels._coarse_max, capability, TYPES, constants)
    types = {**TYPES, "exact": "*fp64", "count": "i32"}
    constants |= {"PARTS": 256, "MARGIN": kernels.MARGIN, "RELATIVE": kernels.RELATIVE}
    assert machine_code(kernels._exact_max, capability, types, constants)


@pytest.mark.quick(1)
@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_thresholds_compile(capability, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from engine_worker.sampling import thresholds

    constants = {"WIDTH": thresholds.WIDTH, **thresholds.TUNING}
    assert machine_code(thresholds._thresholds, capability, THRESHOLD_TYPES, constants)
