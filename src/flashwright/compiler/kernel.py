"""A compiled kernel: what it was made from, what the compiler made of it, and what a launch of it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from flashwright.compiler.nvrtc import CompiledProgram
from flashwright.problem.variant import AttentionVariant

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, repr=False)
class Kernel(Generic[ConfigT]):
    """A kernel, compiled for one architecture."""

    config: ConfigT
    variant: AttentionVariant
    program: CompiledProgram
    shared_bytes: int
    """Dynamic shared memory that a launch requests."""
    threads: int
    source: str
    """All of the device code, as one file that `nvcc` would compile too."""

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def arch(self) -> str:
        return self.program.arch

    @property
    def cubin(self) -> bytes:
        return self.program.cubin

    @property
    def ptx(self) -> str:
        return self.program.ptx

    @property
    def registers(self) -> int:
        return self.program.registers

    @property
    def spill_bytes(self) -> int:
        return self.program.spill_bytes

    @property
    def stack_bytes(self) -> int:
        return self.program.stack_bytes

    def __repr__(self) -> str:
        return (
            f"<Kernel {self.config} for {self.arch}: {self.registers} registers, {self.spill_bytes} bytes spilled, "
            f"{self.shared_bytes} bytes of shared memory, {self.threads} threads>"
        )
