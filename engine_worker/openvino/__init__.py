"""The forward pass on a CPU by OpenVINO: our decoder as its graph, its paged attention over our block tables.

Nothing outside this package imports `openvino`.
"""

import sys

# Without this module, which sends events of usage over the internet from a forked process, OpenVINO does without it.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
