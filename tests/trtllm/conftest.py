"""One executor for each file of tests, with all options that the tests use."""

from collections.abc import Iterator

import pytest

import sluice.trtllm as trtllm
from tests.fakes.trtllm_processors import only_42, only_43, slow
from tests.trtllm.running import start


@pytest.fixture(scope="module")
def executor() -> Iterator[trtllm.Executor]:
    processors = trtllm.LogitsPostProcessorConfig({"only_42": only_42, "slow": slow}, only_43)
    options = {"max_beam_width": 4, "request_stats_max_iterations": 100}
    options["additional_model_outputs"] = [trtllm.AdditionalModelOutput("layers.4")]
    with start(logits_post_processor_config=processors, **options) as executor:
        yield executor
