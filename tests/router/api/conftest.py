"""Fixtures of the tests of adapters."""

import pytest

from router.peers import adapter_catalog, prompt_adapters
from tests.router.api.adapter_calls import A, B


@pytest.fixture
def quick_sync(monkeypatch, quick_recovery):
    """Exchange adapters in a fraction of the usual time."""
    monkeypatch.setattr(adapter_catalog, "SYNC_SECONDS", 0.05)
    monkeypatch.setattr(prompt_adapters, "RETRY_SECONDS", 0.3)


@pytest.fixture
def serving(ring, start, tmp_path):
    """Starts a router that may read prompt adapters in tmp_path, with engines that serve LoRA adapters and have the
    folders /a and /b."""

    async def serving(engines: int = 1, **settings):
        for number in range(engines):
            library = ring.add_engine(f"engine-{number}").serve_adapters()
            library.folders |= {"/a": A, "/b": B}
        ring.add_detokenizer()
        return await start(**{"lora_in_requests": True, "prompt_adapter_folders": (str(tmp_path),), **settings})

    return serving
