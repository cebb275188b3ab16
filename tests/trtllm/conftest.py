"""One executor for each file of tests, with all options that the tests use; and executors of a fake server."""

from collections.abc import Iterator

import pytest

import sluice.trtllm as trtllm
from sluice.client import ClientOptions
from sluice.executor import GenerationExecutor
from sluice.executor.session import Session
from tests.fakes.server_script import Script
from tests.fakes.trtllm_processors import only_42, only_43, slow
from tests.trtllm.running import start


@pytest.fixture(scope="module")
def executor() -> Iterator[trtllm.Executor]:
    processors = trtllm.LogitsPostProcessorConfig({"only_42": only_42, "slow": slow}, only_43)
    options = {"max_beam_width": 4, "request_stats_max_iterations": 100}
    options["additional_model_outputs"] = [trtllm.AdditionalModelOutput("layers.4")]
    with start(logits_post_processor_config=processors, **options) as executor:
        yield executor


@pytest.fixture
def script() -> Script:
    """The answers of the server of `scripted`. Tests change them before a call."""
    return Script(checks_loras=True)


@pytest.fixture
def scripted(address, monkeypatch) -> Iterator[trtllm.Executor]:
    """An executor that treats a fake server as the ring that it started."""

    def connect(*_: object, **__: object) -> GenerationExecutor:
        return GenerationExecutor(Session([address], 8, 0, ClientOptions(), is_own=True))

    monkeypatch.setattr(GenerationExecutor, "create", connect)
    with start(peft_cache_config=trtllm.PeftCacheConfig()) as executor:
        yield executor
