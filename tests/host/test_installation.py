"""A service without its packages reports how to install them."""

import subprocess
import sys
from pathlib import Path

import pytest

from sluice.host import installation
from sluice.host.installation import NEEDED, how_to_install

SERVICES = {"router": "router", "detok_service": "detok", "engine_worker": "engine", "gateway": "gateway"}

RUN = """
import runpy, sys
from sluice.host import installation
real = installation.find_spec
installation.find_spec = lambda name: None if name in {hidden!r} else real(name)
runpy.run_module({service!r}, run_name="__main__", alter_sys=True)
"""


@pytest.mark.process
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_without_its_extra(service) -> None:
    extra = SERVICES[service]
    hidden = NEEDED[extra][:2]
    command = [sys.executable, "-c", RUN.format(hidden=hidden, service=service), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"this installation has no {', '.join(hidden)}. Install with: {how_to_install(extra)}" in line
    assert done.stdout == ""


def test_torch_is_named_only_for_the_engine(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(installation, "CHECKOUT", tmp_path)
    assert how_to_install("gateway") == "pip install 'sluice-serve[gateway]'"
    assert how_to_install("router", "engine") == "pip install torch 'sluice-serve[router,engine]'"


def test_a_checkout_is_installed_in_place() -> None:
    root = Path(__file__).parents[2]
    assert how_to_install("router", "engine") == f"pip install torch -e '{root}[router,engine]'"
