"""The search for the layer at fault if a check of the whole engine fails."""

import pytest

from bench.gpu.findings import Outcome
from bench.gpu.plan import WITHOUT, blame


def holds_if(condition):
    return lambda options: Outcome(bool(condition(options)), "off by 2")


@pytest.mark.parametrize(
    ("layer", "condition"),
    [
        ("CUDA graphs", lambda options: options.get("cuda_graphs") is False),
        ("overlap", lambda options: options.get("overlap") is False),
        ("fused kernels", lambda options: options.get("fused_kernels") is False),
        ("an attention kernel", lambda options: options.get("attention") == "reference"),
        ("more than one layer", lambda options: len(options) == 4),
        ("something else: the check fails without any of them", lambda options: False),
        (
            "one of CUDA graphs, overlap; the check passes without any one of them",
            lambda options: not options.get("cuda_graphs", True) or not options.get("overlap", True),
        ),
    ],
)
def test_the_layer_without_which_the_check_passes_is_found(layer, condition):
    culprit, lines = blame(holds_if(condition))
    assert culprit == layer
    assert len(lines) == len(WITHOUT)
    assert all("off by 2" in line for line in lines)


def test_a_trial_that_raises_does_not_end_the_search():
    def recheck(options):
        if options.get("cuda_graphs") is False and len(options) == 1:
            raise RuntimeError("out of memory\nwith much more")
        return Outcome(options.get("attention") == "reference" and len(options) == 1, "")

    culprit, lines = blame(recheck)
    assert culprit == "an attention kernel"
    assert lines[0] == "without CUDA graphs: DOES NOT HOLD: RuntimeError: out of memory"
