"""Modules without tensors can be imported without torch."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

WITHOUT_TORCH = [
    "engine_worker.core.intake",
    "sluice.settings.engine",
    "engine_worker.core.engine",
    "engine_worker.keeper.__main__",
    "engine_worker.kvcache.cache",
    "engine_worker.ringside.outbox",
    "engine_worker.request",
    "engine_worker.request",
    "engine_worker.scheduling.simple",
    "engine_worker.protocol",
    "engine_worker.step",
    "engine_worker.ringside.worker",
]


@pytest.mark.quick(4)
@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_without_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
