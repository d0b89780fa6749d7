"""Launch limits of the GPU architectures, from the CUDA programming guide's compute-capability table."""

from __future__ import annotations

import re
from dataclasses import dataclass

WARP_SIZE = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_BLOCK_DIM = (1024, 1024, 64)
MAX_GRID_DIM = (2**31 - 1, 65535, 65535)

# Largest dynamic shared memory a block can opt in to, in KiB, by compute capability.
_SHARED_OPT_IN_KIB = {
    70: 96,
    72: 96,
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    88: 99,
    89: 99,
    90: 227,
    100: 227,
    101: 227,
    103: 227,
    110: 227,
    120: 99,
    121: 99,
}


@dataclass(frozen=True)
class Architecture:
    """What one compute capability allows."""

    name: str
    capability: int
    shared_bytes_per_block: int


def architecture(name: str) -> Architecture:
    """The limits of ``sm_80``, ``sm_90a``, …; ValueError names the architectures known."""
    match = re.fullmatch(r"(?:sm|compute)_(\d+)[af]?", name)
    capability = int(match.group(1)) if match else -1
    if capability not in _SHARED_OPT_IN_KIB:
        known = ", ".join(f"sm_{number}" for number in _SHARED_OPT_IN_KIB)
        raise ValueError(f"unknown architecture {name!r}; known: {known}")
    return Architecture(name, capability, _SHARED_OPT_IN_KIB[capability] * 1024)
