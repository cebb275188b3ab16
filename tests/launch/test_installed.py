"""Missing packages of the services are reported."""

import importlib.util

import pytest

from sluice.host.installation import NEEDED
from sluice.launch import OptionsError, Ring
from sluice.launch.local_ring import EXTRAS, check_installed


@pytest.fixture
def without(monkeypatch):
    """Hides the given packages."""
    real = importlib.util.find_spec

    def hide(*names):
        monkeypatch.setattr("sluice.host.installation.find_spec", lambda name: None if name in names else real(name))

    return hide


def test_the_tests_run_with_all_packages():
    check_installed()


def test_all_missing_packages_are_named_once(without):
    without("torch", "tokenizers")
    with pytest.raises(
        OptionsError,
        match=r"missing tokenizers, torch. Install with: pip install torch -e '/.+\[router,detok,engine\]'",
    ):
        check_installed()


@pytest.mark.parametrize("name", sorted({name for extra in EXTRAS for name in NEEDED[extra]}))
def test_no_ring_starts_if_a_package_is_missing(without, name):
    without(name)
    with pytest.raises(OptionsError, match=f"missing {name}"):
        Ring()
