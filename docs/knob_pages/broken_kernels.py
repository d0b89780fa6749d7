"""Kernels with a wait or a barrier taken out of their source, and what the simulator says of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flashwright.bench.knob_effects import early_config
from flashwright.compiler import compile_source
from flashwright.kernel_source import KernelSource, forward_kernel_source
from flashwright.launch_arguments import DeviceTensor, forward_launch
from flashwright.simulation import random_inputs
from flashwright.simulator import SimulatedGPU, SimulationError
from flashwright.tile_shapes import ForwardKernelTileShapes

_FILE = "ampere_forward.cuh"
_REMOVALS = {
    "the wait before S = QKᵀ": (
        "    const bool last = step + 1 == kv.range.count;\n    wait_for_copies<0>();\n",
        "    const bool last = step + 1 == kv.range.count;\n",
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
    launch, shapes = forward_launch(config, *tensors), ForwardKernelTileShapes(config)
    try:
        gpu.load(program.ptx).launch(
            program.name, launch.grid, (shapes.threads, 1, 1), shapes.shared_bytes, [bytes(launch.arguments)]
        )
    except SimulationError as error:
        return error.kind, "\n".join(line for line in str(error).splitlines() if not line.startswith("  kernel:"))
    raise ValueError("the simulator found nothing wrong with a kernel that is broken")
