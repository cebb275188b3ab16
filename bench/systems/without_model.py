"""The engine alone, with constant logits instead of the model: the cost of a step without the model's computation.

Run as a file, in any checkout: python bench/systems/without_model.py [the engine's own flags, such as --model]
"""

import os
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Import the modules of the measured checkout, which may differ from the one that contains this file.
sys.path.insert(0, os.getcwd())

from bench.harness.children import serve
from bench.systems.engine_alone import EngineAlone
from sluice.settings.read import load_settings
from sluice.settings.services import EngineSettings


def engine_without_model(settings: EngineSettings) -> EngineAlone:
    engine = EngineAlone(settings)
    runner: Any = engine._runner
    forward = runner._forward
    generator = torch.Generator().manual_seed(1)

    @cache
    def constant(rows: int) -> Tensor:
        return torch.randn(rows, forward.vocab_size, generator=generator)

    def logits(_moves: Any, step: Any, *_: Any) -> Tensor | None:
        return constant(step.num_rows) if step is not None and step.num_rows else None

    forward.logits = logits
    return engine


if __name__ == "__main__":
    serve(engine_without_model(load_settings(EngineSettings)).answer)
