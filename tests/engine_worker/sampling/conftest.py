from collections.abc import Iterator

import pytest
import torch

from engine_worker.sampling.processors import Processors, find_processors
from sluice.executor.callbacks import Callbacks
from sluice.settings.engine import ProcessorNames
from tests.engine_worker.sampling.processor_tools import VOCAB
from tests.fakes.processes import LIMIT


@pytest.fixture
def serve() -> Iterator:
    """An engine's processors that call functions which are served here."""
    served = Callbacks()

    def make(batched=None, *, seconds=LIMIT, warnings=None, **named) -> Processors:
        settings = served.settings(named, batched)
        names = ProcessorNames(**settings, logits_processor_timeout=seconds)
        return find_processors(names, lambda event, reason: None if warnings is None else warnings.append(reason))

    yield make
    served.close()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
