"""Starts of a detokenizer process that fail, its help, and its imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.lanes.inbox import Inbox
from sluice.lanes.keys import Security
from sluice.wire.requests import ToDetokenizer
from tests.detok_service.processes import SECONDS
from tests.fakes.tokenizers import TINY

pytestmark = pytest.mark.process


def run(*flags, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    return subprocess.run(
        [sys.executable, "-m", "detok_service", *flags],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=Path(__file__).parents[2],
        env=clean | variables,
        check=False,
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("flags", "variables", "quoted"),
    [
        ([], {}, "model"),
        (["--model", "/nowhere"], {}, "/nowhere"),
        (["--model", str(TINY), "--max-streams", "0"], {}, "max_streams"),
        (["--model", str(TINY), "--listen", "ipx://x"], {}, "ipx://x"),
        (["--model", str(TINY)], {}, "--insecure-ring"),
        (["--model", str(TINY), "--keys", "/no/such/folder"], {}, "/no/such/folder/secret/detok.key"),
        (["--model", str(TINY)], {"SLUICE_DETOK_PORT": "1"}, "SLUICE_DETOK_PORT"),
    ],
)
def test_bad_settings_are_named(flags, variables, quoted):
    result = run(*flags, **variables)
    assert result.returncode == 1
    assert quoted in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("address", ["ipc://{}/detok", "tcp://127.0.0.1:*"])
def test_an_address_in_use_is_reported_in_one_line(context, tmp_path, address):
    inbox = Inbox(context, address.format(tmp_path), ToDetokenizer, security=Security(insecure=True))
    result = run("--model", str(TINY), "--insecure-ring", "--listen", inbox.address)
    owner = f"process {os.getpid()}" if address.startswith("ipc") else "another process"
    assert json.loads(result.stderr)["error"] == f"cannot listen on {inbox.address}: {owner} listens there"
    assert result.returncode == 1
    inbox.close()


def test_help_and_light_imports():
    result = run("--help")
    assert result.returncode == 0
    assert "--drain-timeout" in result.stdout
    code = (
        "import sys, detok_service.__main__; print([m for m in sys.modules if m in ('torch', 'transformers', 'numpy')])"
    )
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert imported.stdout.strip() == "[]"
