"""Kernels with a wait or a barrier taken out of their source, and what the simulator reports of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flashwright.compiler.nvrtc import compile_source
from flashwright.kernels.forward.ampere import AMPERE_FORWARD
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes
from flashwright.kernels.forward.ampere.source import forward_kernel_source
from flashwright.kernels.source import KernelSource
from flashwright.kernels.tensors import DeviceTensor
from flashwright.problem.reference import random_inputs
from flashwright.runtime.simulated import SIMULATED_MULTIPROCESSORS
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.workbench.bench.knob_effects import early_config

_FILE = "forward/ampere.cuh"
_REMOVALS = {
    "the wait before S = QKᵀ": (
        "    Copies::wait<0>(); // @operand K\n    // After this barrier every thread's part of K",
        "    // After this barrier every thread's part of K",
    ),
    "the barrier before S = QKᵀ": (
        "    __syncthreads();\n    if constexpr (cfg::two_kv_stages) {\n        if (!last)",
        "    if constexpr (cfg::two_kv_stages) {\n        if (!last)",
    ),
    "the barrier between S = QKᵀ and the copy of the next K": (
        "        __syncthreads();\n        if (cfg::eager_load_blocks && !last)",
        "        if (cfg::eager_load_blocks && !last)",
    ),
}


@dataclass(frozen=True)
class BrokenKernel:
    missing: str
    kind: str
    message: str


def broken_kernels(arch: str) -> tuple[BrokenKernel, ...]:
    """Each removal by itself, and how the simulator reports it."""
    return tuple(BrokenKernel(missing, *_verdict(_without(*lines), arch)) for missing, lines in _REMOVALS.items())


def _without(lines: str, remaining: str) -> KernelSource:
    source = forward_kernel_source(early_config())
    headers = dict(source.headers)
    if lines not in headers[_FILE]:
        raise ValueError(f"{_FILE} no longer has the lines {lines!r}")
    headers[_FILE] = headers[_FILE].replace(lines, remaining)
    return replace(source, headers=tuple(headers.items()))


def _verdict(source: KernelSource, arch: str) -> tuple[str, str]:
    config, program, gpu = early_config(), compile_source(source, arch), SimulatedGPU(arch)
    arrays = [np.ascontiguousarray(array) for array in random_inputs(config, heads=1)]
    strides = tuple(stride // 2 for stride in arrays[0].strides)
    tensors = [
        DeviceTensor(name, gpu.to_device(array), config.dtype, array.shape, strides)
        for name, array in zip("qkvo", [*arrays, np.zeros_like(arrays[0])], strict=True)
    ]
    launch = AMPERE_FORWARD.launch(config, *tensors, multiprocessors=SIMULATED_MULTIPROCESSORS)
    shapes = ForwardKernelTileShapes(config)
    try:
        gpu.load(program.ptx).launch(
            program.name, launch.grid, (shapes.threads, 1, 1), shapes.shared_bytes, [bytes(launch.arguments)]
        )
    except SimulationError as error:
        return error.kind, "\n".join(line for line in str(error).splitlines() if not line.startswith("  kernel:"))
    raise ValueError("the simulator found nothing wrong with a kernel that is broken")
