"""Every attention kernel that this machine supports against the reference, on its GPU if it has one. `python -m
bench.gpu` runs these tests; they need no package but torch and pytest."""

import pytest

from engine_worker.attention.backend import Site, capability_of
from engine_worker.attention.paged import triton_store
from engine_worker.attention.trial import verify_store
from tests.engine_worker.attention.on_device import BACKENDS, DEVICE, DTYPE, HEADS, ON_GPU, check

pytestmark = pytest.mark.slow


STORE = "Triton's store"


@pytest.mark.parametrize("title", [*BACKENDS, STORE])
def test_kernel_agrees_with_the_reference(title, record_property):
    record_property("detail", check_store() if title == STORE else check(BACKENDS[title]))


def check_store() -> str:
    if not ON_GPU:
        pytest.skip("it needs a CUDA device")
    pytest.importorskip("triton")
    for heads in HEADS:
        verify_store(triton_store(), Site(DEVICE, capability_of(DEVICE), DTYPE, heads, (None,), 0))
    return f"{len(HEADS)} shapes of heads"
