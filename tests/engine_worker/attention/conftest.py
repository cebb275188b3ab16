import sys

import pytest

from tests.engine_worker.attention.fake_installs import has_torch


@pytest.fixture
def installed(monkeypatch):
    """No kernel is installed until a test adds one, and torch is 2.11. Returns the monkeypatch."""
    for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute", "engine_worker.attention.kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    has_torch(monkeypatch, "2.11.0")
    return monkeypatch
