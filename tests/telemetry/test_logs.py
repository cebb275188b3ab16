import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

CODE = """
import sys
from sluice.telemetry.logs import configure
log = configure("service", "debug", exception_texts=sys.argv[1] == "True")
def fail(text):
    try:
        {}[text]
    except KeyError as error:
        raise ValueError(f"cannot do {text}") from error
try:
    fail("canary")
except ValueError as error:
    log.exception("it failed", request_id="r")
    log.error("again", exc_info=error)
"""


@pytest.mark.parametrize("texts", [False, True])
def test_exception_messages_are_logged_only_with_exception_texts(texts):
    process = subprocess.run([sys.executable, "-c", CODE, str(texts)], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["it failed", "again"]
    for line in lines:
        assert "ValueError" in line["exception"]
        assert "KeyError" in line["exception"]
        assert "in fail" in line["exception"]
        assert ("canary" in line["exception"].replace('fail("canary")', "")) is texts
