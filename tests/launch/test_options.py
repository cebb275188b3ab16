"""Unknown options of a ring are refused with what to write in their place."""

import inspect
import re

import pytest

from sluice import LLM
from sluice.launch import Ring
from sluice.launch.options import RING_OPTIONS


def test_the_options_are_those_of_the_constructor():
    assert inspect.signature(Ring).parameters.keys() - {"model", "options"} <= RING_OPTIONS


NAMES_OF_LLM = [
    ("tensor_parallel_size", "engine_args={'tensor_parallel': ...}"),
    ("dtype", "engine_args={'dtype': ...}"),
    ("gpu_memory_utilization", "engine_args={'kv_memory_fraction': ...}"),
]
"""Options that the class LLM accepts under the names of other libraries."""


@pytest.mark.parametrize(("option", "hint"), NAMES_OF_LLM)
def test_an_option_of_other_libraries(option, hint):
    with pytest.raises(TypeError, match=re.escape(f"unknown option {option!r}; did you mean {hint}?")):
        Ring(**{option: 2})


@pytest.mark.parametrize("start", [Ring, LLM])
@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("tensor_paralel", "engine_args={'tensor_parallel': ...}"),
        ("max_tenant_requests", "router_args={'max_tenant_requests': ...}"),
        ("enginez", "'engines'"),
        ("start_timout", "'start_timeout'"),
    ],
)
def test_an_unknown_option(start, option, hint):
    with pytest.raises(TypeError, match=re.escape(f"unknown option {option!r}; did you mean {hint}?")):
        start(**{option: 2})


def test_options_of_an_executor_are_known():
    with pytest.raises(TypeError, match="did you mean 'max_batch_size'"):
        LLM(max_batch_siz=2)
    with pytest.raises(TypeError, match="unknown option 'detokenizers'; did you mean 'num_postprocess_workers'"):
        LLM(detokenizers=2)
    with pytest.raises(TypeError, match="unknown option 'observe'"):
        LLM(observe=print)
