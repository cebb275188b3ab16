"""Random services are killed while streams of every kind run. `python -m tests.chaos.kills` does so for longer."""

import pytest
from msgspec.structs import replace

from bench.deaths.kills import WITH_ADAPTERS, WITH_IMAGES, WITH_QWEN_VL, KillPlan, KillResult, measure, measure_qwen_vl
from bench.deaths.precisions import PRECISIONS, PrecisionPlan
from bench.deaths.precisions import measure as measure_precisions
from bench.deaths.requests import KINDS
from engine_worker.openvino.compiled import has_bfloat16

pytestmark = pytest.mark.timeout(600)
SHORT_RUN = {"streams": 10, "kills": 3, "seconds_between": 2.0}


def check_all_streams_are_right(parts: list[KillResult]) -> None:
    for result in parts:
        assert sum(result.killed.values()) == result.plan.kills
        assert result.streams >= result.plan.streams
        assert (result.failed, result.wrong, result.faults) == (0, 0, [])


def test_no_stream_fails_or_differs_when_services_are_killed(tmp_path):
    check_all_streams_are_right([measure(KillPlan(len(KINDS), kills=3, max_tokens=120), tmp_path, lambda _: None)])


@pytest.mark.long
def test_no_stream_with_pool_files_adapters_or_images_fails_or_differs_when_services_are_killed(tmp_path):
    with_adapters = replace(WITH_ADAPTERS, streams=10, kills=2)
    with_images = replace(WITH_IMAGES, streams=6, kills=2, seconds_between=2.0)
    plan = KillPlan(len(KINDS), kills=1, max_tokens=120, with_files=True)
    plan = replace(plan, adapters=with_adapters, images=with_images)
    parts = measure(plan, tmp_path, lambda _: None).parts
    assert len(parts) == 4
    check_all_streams_are_right(parts)


@pytest.mark.long
def test_no_stream_with_images_of_any_size_fails_or_differs_when_services_are_killed(tmp_path):
    check_all_streams_are_right([measure_qwen_vl(replace(WITH_QWEN_VL, **SHORT_RUN), tmp_path, lambda _: None)])


@pytest.mark.long
@pytest.mark.usefixtures("real_model")
def test_no_stream_of_a_real_model_fails_or_differs_in_any_precision(tmp_path):
    kills = KillPlan(17, 100, kills=4, seconds_between=8.0)
    precisions = tuple(name for name in PRECISIONS if name != "bfloat16" or has_bfloat16())
    found = measure_precisions(PrecisionPlan(kills=kills, precisions=precisions), tmp_path, lambda _: None).precisions
    assert len(found) == len(precisions)
    check_all_streams_are_right(list(found.values()))
