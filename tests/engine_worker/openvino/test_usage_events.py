"""OpenVINO sends no usage events over the internet."""

import subprocess
import sys

CODE = """
import engine_worker.openvino.compiled
import openvino.tools.ovc as tools
print(type(tools.telemetry).__module__)
"""


def test_no_usage_events_are_sent() -> None:
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert process.stdout == "openvino.tools.ovc.telemetry_stub\n"
