import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine_worker.layers.packing import LIBRARIES, MKL, ONEDNN, Packer, is_batch_invariant
from tests.engine_worker.layers.claims import broken_claims
from tests.fakes.products import exact, inexact, other_in_small_batches

WEIGHT = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
SMALL = inexact(other_in_small_batches)

INSTRUCTION_SETS = [
    pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}, marks=pytest.mark.long),
    {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    # COMPATIBLE: MKL's results are the same on every CPU. With these settings no product is batch invariant.
    pytest.param({"ONEDNN_MAX_CPU_ISA": "AVX", "MKL_CBWR": "COMPATIBLE"}, marks=pytest.mark.long),
]


@pytest.mark.parametrize("library", [library for library in LIBRARIES if library.exists()])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 3), (64, 200), (640, 256), (1000, 130)])
def test_a_packed_product_equals_the_plain_product(library, biased, inputs, outputs):
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=random)
    bias = torch.randn(outputs, generator=random) if biased else None
    product = library.pack(weight)
    x = torch.randn(70, inputs, generator=random)
    expected = F.linear(x, weight, bias)
    for rows in (0, 1, 2, 3, 16, 17, 70):
        torch.testing.assert_close(product(x[:rows], bias), expected[:rows], atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(product(x.T.contiguous().T[:5], bias), expected[:5], atol=1e-3, rtol=1e-4)


def test_the_first_batch_invariant_library_is_chosen():
    for libraries, summary in (
        ([SMALL, exact()], "exact, batch invariant"),
        ([exact("first"), exact("second")], "first, batch invariant"),
        ([exact("absent", exists=False), exact()], "exact, batch invariant"),
    ):
        packer = Packer(libraries)
        assert is_batch_invariant(packer.pack(WEIGHT), 40)
        assert (packer.invariant, packer.summary) == (True, summary)


def test_if_no_library_is_batch_invariant_the_first_is_used_and_nothing_is_claimed():
    packer = Packer([SMALL, inexact(other_in_small_batches, "second")])
    product = packer.pack(WEIGHT)
    assert not torch.equal(product(WEIGHT[:1], None), product(WEIGHT, None)[:1])
    assert (packer.invariant, packer.summary) == (False, "inexact, not batch invariant")


def test_one_shape_that_is_not_invariant_revokes_the_claim():
    wide = inexact(lambda rows: slice(None) if rows == 1 else slice(0), "MKL")
    packer = Packer([wide._replace(pack=lambda weight: (wide if len(weight) > 24 else exact()).pack(weight))])
    packer.pack(WEIGHT)
    assert packer.summary == "MKL, batch invariant"
    packer.pack(WEIGHT.repeat(2, 1))
    assert packer.summary == "MKL, not batch invariant"


def test_weights_that_cannot_be_packed():
    assert Packer([]).pack(WEIGHT) is None
    assert Packer([exact()]).pack(WEIGHT.bfloat16()) is None
    assert Packer([exact()]).pack(WEIGHT.to("meta")) is None
    assert (Packer([]).invariant, Packer([]).summary) == (False, "not packed")


@pytest.mark.parametrize(
    "where",
    [
        lambda rows: slice(None) if rows == 1 else slice(0),
        lambda rows: slice(None) if 4 < rows < 8 else slice(0),
        lambda rows: slice(rows // 4 * 4, None),
        lambda rows: slice(None) if rows > 300 else slice(0),
        lambda rows: slice(500, 501),
    ],
    ids=["a single row", "a few rows", "the last rows", "many rows", "one place"],
)
def test_the_trial_detects_differences(where):
    assert not is_batch_invariant(inexact(where).pack(WEIGHT), 40)


@pytest.mark.quick(2)
@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("libraries", [LIBRARIES, (MKL,), (ONEDNN,), LIBRARIES[::-1]])
def test_claims_on_this_cpu_are_true(libraries, threads):
    """Tests more batches than the packer does when it decides."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        _, broken = broken_claims(libraries)
    finally:
        torch.set_num_threads(num_threads)
    assert broken == []


@pytest.mark.process
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS, ids=lambda variables: " ".join(variables.values()))
def test_claims_with_other_instruction_sets_are_true(instructions):
    """An approximation of other CPUs. In separate processes, since the libraries read these variables once."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.engine_worker.layers.claims"],
        env=os.environ | instructions,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    assert json.loads(process.stdout)["broken"] == []
