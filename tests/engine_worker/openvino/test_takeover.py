"""A stream continues from another engine's blocks with the same bits."""

from functools import partial
from pathlib import Path

import pytest

from engine_worker.openvino.compiled import has_bfloat16
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.runner.extensions import Extensions
from engine_worker.runner.runner import ModelRunner
from sluice import tiny_model
from tests.engine_worker.openvino.loaded import load
from tests.engine_worker.takeover import check_takeover

NEEDS_BFLOAT16 = pytest.mark.skipif(not has_bfloat16(), reason="this CPU does not compute bfloat16 in hardware")


def load_in(folder: PoolFolder, **options: object) -> ModelRunner:
    return load(tiny_model.path(), extensions=Extensions(pool_folder=folder), kv_cache_tokens=512, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"quantize": "int8"},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"quantize": "int4"}, marks=pytest.mark.long),
        pytest.param({"kv_precision": "float16"}, marks=pytest.mark.long),
        pytest.param({"dtype": "bfloat16"}, marks=[NEEDS_BFLOAT16, pytest.mark.long]),
    ],
    ids=str,
)
def test_a_stream_continues_with_the_same_bits(shared_memory: Path, options: dict[str, str]) -> None:
    check_takeover(partial(load_in, **options), shared_memory)
