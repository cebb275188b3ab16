"""The demo of the README: a stream that survives three kills."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.survive.demo import PROMPT

ROOT = Path(__file__).parents[2]
KILL = re.compile(r"^✘ kill -9 (\S+): .*\n", re.MULTILINE)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_kills_three_services_and_the_text_is_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.survive"], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    engine, detokenizer, router = KILL.findall(done.stdout)
    assert engine in ("engine-0", "engine-1")
    assert detokenizer in ("detok-0", "detok-1")
    assert router == "router"
    assert PROMPT in done.stdout
    assert "3 services killed, the same text as undisturbed" in done.stdout


def test_the_picture_in_the_readme_shows_this_demo() -> None:
    picture = (ROOT / "docs" / "images" / "survive.svg").read_text(encoding="utf-8").replace("&#160;", " ")
    assert len(re.findall(r"✘ kill -9 (engine-\d|detok-\d|router): ", picture)) == 3
    assert "✔ 3 services killed, the same text as undisturbed" in picture
