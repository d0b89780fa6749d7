"""Kernels with a wait or a barrier taken out of their source, and what the simulator reports of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flashwright.problem.reference import random_inputs
from flashwright.runtime.simulated import simulate_forward
from flashwright.simulator.errors import SimulationError
from flashwright.workbench.bench.knob_effects import early_config

_FILE = "forward/ampere.cuh"
_REMOVALS = {
    "the wait before S = QKᵀ": (
        "        Copies::wait<0>(); // @operand K\n        // After this barrier every thread's part of K",
        "        // After this barrier every thread's part of K",
    ),
    "the barrier before S = QKᵀ": (
        "        __syncthreads();\n        if constexpr (cfg::two_kv_stages) {\n            if (!last)",
        "        if constexpr (cfg::two_kv_stages) {\n            if (!last)",
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
    return tuple(BrokenKernel(missing, *_verdict(*lines, arch)) for missing, lines in _REMOVALS.items())


def _verdict(lines: str, remaining: str, arch: str) -> tuple[str, str]:
    config = early_config()
    arrays = [np.ascontiguousarray(array) for array in random_inputs(config, heads=1)]
    try:
        simulate_forward(config, *arrays, arch=arch, edit=lambda source: source.edited(_FILE, lines, remaining))
    except SimulationError as error:
        return error.kind, "\n".join(line for line in str(error).splitlines() if not line.startswith("  kernel:"))
    raise ValueError("the simulator found nothing wrong with a kernel that is broken")
