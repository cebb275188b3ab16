"""Tests Triton kernels without a GPU: by Triton's interpreter, and by compiling them to machine code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
CAPABILITIES = (80, 90)


def interpret(tests: Path) -> None:
    """Run tests in a separate process, because Triton reads TRITON_INTERPRET when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def machine_code(kernel, capability: int, types: dict[str, str], constants: dict[str, object]) -> bytes:
    """Compile a kernel for GPUs of this compute capability. `types`: of all arguments except constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {name: constants[name] for name in kernel.arg_names if name in constants})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
