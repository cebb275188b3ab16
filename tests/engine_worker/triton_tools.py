"""Tests Triton kernels without a GPU, by compiling them to machine code. `test_interpreted` runs them."""

import sys

import pytest

needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
CAPABILITIES = (80, 90)


def machine_code(kernel, capability: int, types: dict[str, str], constants: dict[str, object]) -> bytes:
    """Compile a kernel for GPUs of this compute capability. `types`: of all arguments except constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {name: constants[name] for name in kernel.arg_names if name in constants})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
