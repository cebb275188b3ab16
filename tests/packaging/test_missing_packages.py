"""Programs that are started without their packages name the missing extra instead of an internal module."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

RUN = "import runpy, sys; sys.modules[{hidden!r}] = None; runpy.run_module({module!r}, run_name='__main__')"


@pytest.mark.parametrize(
    ("module", "hidden", "extra"), [("bench", "matplotlib", "bench"), ("k8s.render", "helm_python", "dev")]
)
def test_a_tool_of_the_checkout(module, hidden, extra) -> None:
    command = [sys.executable, "-c", RUN.format(hidden=hidden, module=module), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"python -m {module} needs the extra {extra}: pip install")


def test_the_names_of_tensorrt_llm_need_no_numpy() -> None:
    code = "import sys; sys.modules['numpy'] = None; import sluice.trtllm"
    subprocess.run([sys.executable, "-c", code], check=True)
