"""Limits of a streaming multiprocessor of each GPU architecture; GPU models."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

KIB = 1024
RESERVED_SHARED_BYTES = 1 * KIB
"""Shared memory that the system reserves per resident block, from compute capability 8.0 on."""


@dataclass(frozen=True)
class Architecture:
    """Limits from the CUDA Programming Guide, "Technical Specifications per Compute Capability"."""

    name: str
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    """The most a block may request (opt-in)."""
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 64 * KIB
    registers_per_thread: int = 255
    register_allocation_unit: int = 256
    """A warp is allocated registers in multiples of this."""
    warp_allocation_unit: int = 4

    @property
    def compute_capability(self) -> tuple[int, int]:
        return divmod(int(re.sub(r"\D", "", self.name)), 10)


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_80", 164 * KIB, 163 * KIB, threads_per_sm=2048, blocks_per_sm=32),
        Architecture("sm_86", 100 * KIB, 99 * KIB, threads_per_sm=1536, blocks_per_sm=16),
        Architecture("sm_89", 100 * KIB, 99 * KIB, threads_per_sm=1536, blocks_per_sm=24),
        Architecture("sm_90", 228 * KIB, 227 * KIB, threads_per_sm=2048, blocks_per_sm=32),
        Architecture("sm_100", 228 * KIB, 227 * KIB, threads_per_sm=2048, blocks_per_sm=32),
        Architecture("sm_103", 228 * KIB, 227 * KIB, threads_per_sm=2048, blocks_per_sm=32),
        Architecture("sm_120", 100 * KIB, 99 * KIB, threads_per_sm=1536, blocks_per_sm=24),
        Architecture("sm_121", 100 * KIB, 99 * KIB, threads_per_sm=1536, blocks_per_sm=24),
    )
}


def architecture(name: str) -> Architecture:
    """The architecture of that name; `sm_90a` is `sm_90` with more instructions, and has its limits."""
    found = ARCHITECTURES.get(re.sub(r"[af]$", "", name))
    if found is None:
        raise ValueError(f"arch: {name!r} is not known; known: {', '.join(ARCHITECTURES)}")
    return replace(found, name=name)


def parse_arch(name: str) -> str:
    """A target for the compiler, checked: `sm_80` or later, perhaps with an `a` or `f` suffix."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"arch: {name!r} is not a GPU target; expected a text such as 'sm_80' or 'sm_90'")
    if int(match[1]) < 80:
        raise ValueError(f"arch: {name} is too old; the kernels need sm_80 (Ampere) or later")
    return name


@dataclass(frozen=True)
class GPUModel:
    """A GPU as kernels are chosen for it: measured results are found by its name; rules read its capabilities."""

    name: str
    compute_capability: tuple[int, int]
    shared_bytes_per_sm: int

    @classmethod
    def of_architecture(cls, name: str, arch: str) -> GPUModel:
        """A model with the multiprocessors of an architecture."""
        sm = architecture(arch)
        return cls(name, sm.compute_capability, sm.shared_bytes_per_sm)

    @property
    def arch(self) -> str:
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"
