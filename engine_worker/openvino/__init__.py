"""The forward pass on a CPU, computed by OpenVINO: our decoder as an OpenVINO graph, whose paged attention reads our
block tables.

Nothing outside this package imports `openvino`.
"""

import sys

# openvino_telemetry sends usage events over the internet from a forked process. OpenVINO treats it as optional: with
# this entry the import fails, and a stub replaces it.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
