"""Small kernels that include a header of the device code by itself."""

from __future__ import annotations

from flashwright.compiler.nvrtc import compile_source
from flashwright.kernels.source import KernelSource, device_headers, variant_constants
from flashwright.problem.variant import AttentionVariant


def compile_device_code(header: str, body: str, **variant: bool) -> str:
    """PTX of a kernel named `kernel`; the header finds the constants of a variant, and none of a config."""
    constants = variant_constants(AttentionVariant(**variant))
    lines = [f"constexpr {type(value).__name__} {name} = {str(value).lower()};" for name, value in constants.items()]
    text = "\n".join(
        [
            "enum class DType { FP16, BF16 };",
            "namespace variant {",
            *lines,
            "}",
            f'#include "{header}"',
            body,
        ]
    )
    return compile_source(KernelSource(text, device_headers(), "kernel", "kernel.cu"), "sm_80").ptx
