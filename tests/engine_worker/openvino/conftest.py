import pytest

pytest.importorskip("openvino", reason="the extra openvino is not installed")
