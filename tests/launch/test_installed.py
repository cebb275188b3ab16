"""An installation without the services' packages says so."""

import importlib.util

import pytest

from sluice.launch import OptionsError, Ring
from sluice.launch.installed import EXTRAS, check_installed
from sluice.ring.extras import NEEDED


@pytest.fixture
def without(monkeypatch):
    """Hides packages."""
    real = importlib.util.find_spec

    def hide(*names):
        monkeypatch.setattr("sluice.ring.extras.find_spec", lambda name: None if name in names else real(name))

    return hide


def test_everything_is_here():
    check_installed()


def test_what_is_missing_is_named_once(without):
    without("torch", "tokenizers")
    with pytest.raises(
        OptionsError, match=r"has no tokenizers, torch: pip install torch 'sluice-serve\[router,detok,engine\]'"
    ):
        check_installed()


@pytest.mark.parametrize("name", sorted({name for extra in EXTRAS for name in NEEDED[extra]}))
def test_no_ring_starts_without_one_of_them(without, name):
    without(name)
    with pytest.raises(OptionsError, match=f"has no {name}"):
        Ring()
