"""What a launch did: counts per instruction of the program, and their totals."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from .access_patterns import AccessPatterns

if TYPE_CHECKING:
    from .program import Program
    from .wave import Wave


@dataclass
class InstructionCounts:
    """Counts of one PTX instruction (or of any sum of them)."""

    executed: int = 0
    shared_accesses: int = 0
    shared_wavefronts: int = 0
    shared_wavefronts_ideal: int = 0
    global_requests: int = 0
    global_sectors: int = 0
    global_sectors_ideal: int = 0
    bytes_global_to_shared: int = 0
    bytes_global_to_registers: int = 0
    bytes_shared_to_global: int = 0
    bytes_registers_to_global: int = 0
    bytes_shared_to_registers: int = 0
    bytes_registers_to_shared: int = 0
    bytes_local_to_registers: int = 0
    bytes_registers_to_local: int = 0
    tensor_flops: int = 0

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts beyond the ideal."""
        return self.shared_wavefronts - self.shared_wavefronts_ideal

    def add(self, other: InstructionCounts) -> None:
        for item in fields(other):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


_BYTE_FIELDS = {
    ("global", "load"): ("bytes_global_to_registers",),
    ("global", "store"): ("bytes_registers_to_global",),
    ("global", "atomic"): ("bytes_global_to_registers", "bytes_registers_to_global"),
    ("global", "async-copy"): ("bytes_global_to_shared",),
    ("shared", "load"): ("bytes_shared_to_registers",),
    ("shared", "store"): ("bytes_registers_to_shared",),
    ("shared", "atomic"): ("bytes_shared_to_registers", "bytes_registers_to_shared"),
    ("local", "load"): ("bytes_local_to_registers",),
    ("local", "store"): ("bytes_registers_to_local",),
    ("local", "atomic"): ("bytes_local_to_registers", "bytes_registers_to_local"),
}


class Counters:
    """Collects during a launch: ``executed[pc]`` by the wave, the rest by memory accesses."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.executed = [0] * len(program.code)
        self._memory: dict[int, InstructionCounts] = {}
        self._patterns: dict[int, AccessPatterns] = {}
        self.barriers = 0
        self.mbarrier_phases = 0
        self.mbarrier_blocked = 0
        self.max_async_groups_in_flight = 0

    def _at(self, pc: int) -> InstructionCounts:
        counts = self._memory.get(pc)
        if counts is None:
            counts = self._memory[pc] = InstructionCounts()
        return counts

    def _patterns_of(self, wave: Wave) -> AccessPatterns:
        patterns = self._patterns.get(wave.threads)
        if patterns is None:
            patterns = self._patterns[wave.threads] = AccessPatterns(wave.threads)
        return patterns

    def count_shared(self, wave: Wave, addresses: np.ndarray, width: int) -> None:
        """Wavefronts of one shared-memory instruction of the active threads."""
        if wave.trace is not None:
            wave.trace.access(wave, "shared", addresses, width)
        cost = self._patterns_of(wave).shared(addresses, wave.lanes, width)
        counts = self._at(wave.pc)
        counts.shared_accesses += cost.requests
        counts.shared_wavefronts += cost.wavefronts
        counts.shared_wavefronts_ideal += cost.ideal

    def count_global(self, wave: Wave, addresses: np.ndarray, width: int, access: str) -> None:
        """Sectors and bytes of one global-memory instruction of the active threads."""
        if wave.trace is not None:
            wave.trace.access(wave, "global", addresses, width)
        cost = self._patterns_of(wave).global_(addresses, wave.lanes, width)
        counts = self._at(wave.pc)
        counts.global_requests += cost.requests
        counts.global_sectors += cost.sectors
        counts.global_sectors_ideal += cost.ideal
        self.count_bytes(wave, "global", access, addresses.size * width)

    def count_bulk(self, wave: Wave, field: str, amount: int, sectors: int, ideal: int) -> None:
        """One bulk copy: its bytes in bounds, and the sectors of global memory they lie in."""
        counts = self._at(wave.pc)
        counts.global_requests += 1
        counts.global_sectors += sectors
        counts.global_sectors_ideal += ideal
        setattr(counts, field, getattr(counts, field) + amount)

    def count_bytes(self, wave: Wave, space: str, access: str, amount: int) -> None:
        names = _BYTE_FIELDS.get((space, access))
        if names is not None:
            counts = self._at(wave.pc)
            for name in names:
                setattr(counts, name, getattr(counts, name) + amount)

    def at(self, pc: int) -> InstructionCounts:
        """All counts of one instruction."""
        counts = replace(self._memory[pc]) if pc in self._memory else InstructionCounts()
        counts.executed = self.executed[pc]
        counts.tensor_flops = counts.executed * self._program.code[pc].operation.tensor_flops
        return counts

    def add_to(self, total: InstructionCounts) -> None:
        """Add the counts of every instruction."""
        for counts in self._memory.values():
            total.add(counts)
        total.executed += sum(self.executed[:-1])  # the exit appended to every program is not the kernel's
        total.tensor_flops += sum(
            executed * item.operation.tensor_flops
            for executed, item in zip(self.executed, self._program.code, strict=True)
        )
