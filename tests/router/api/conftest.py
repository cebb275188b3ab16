"""Fixtures of the tests of LoRA adapters."""

import pytest

from tests.router.api.adapter_calls import A, B


@pytest.fixture
def serving(ring, start):
    """Starts a router with engines that serve adapters and have the folders /a and /b."""

    async def serving(engines: int = 1, **settings):
        for number in range(engines):
            library = ring.add_engine(f"engine-{number}").serve_adapters()
            library.folders |= {"/a": A, "/b": B}
        ring.add_detokenizer()
        return await start(**{"lora_in_requests": True, **settings})

    return serving
