"""The demo of the README: a stream over three kills."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.survive.demo import PROMPT

ROOT = Path(__file__).parents[2]
KILL = re.compile(r"^✘ kill -9 (\S+): .*\n", re.MULTILINE)


@pytest.mark.timeout(300)
def test_the_stream_goes_on_and_its_text_is_the_same() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "examples.survive"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert found.returncode == 0, found.stdout + found.stderr
    engine, detokenizer, router = KILL.findall(found.stdout)
    assert engine in ("engine-0", "engine-1")
    assert detokenizer in ("detok-0", "detok-1")
    assert router == "router"
    assert PROMPT in found.stdout
    assert "3 services killed, the same text as undisturbed" in found.stdout


def test_the_picture_of_the_readme_is_of_this_demo() -> None:
    picture = (ROOT / "docs" / "images" / "survive.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert len(re.findall(r"✘ kill -9 (engine-\d|detok-\d|router): ", picture)) == 3
    assert "✔ 3 services killed, the same text as undisturbed" in picture
