"""What follows from a Hopper decode config before anything is compiled: threads, registers, shared memory."""

from __future__ import annotations

from functools import cached_property

from flashwright.hardware.architectures import architecture
from flashwright.hardware.units import ELEMENT_BYTES
from flashwright.kernels.decode.hopper.config import WARPGROUP_ROWS, HopperDecodeKernelConfig
from flashwright.kernels.shared_layout import SharedLayout

WARPGROUP_THREADS = 128
BARRIER_PAIR_BYTES = 16
STATIC_BYTES = 1024
"""More than the kernel has beside its dynamic shared memory."""
CONSUMER_REGISTERS = 208
MOST_OPERAND_REGISTERS = CONSUMER_REGISTERS - 40
"""For O, S and P; the others hold addresses and sums."""
MOST_WITH_Q = MOST_OPERAND_REGISTERS - 16
"""For O, S, P and Q: with more, some are spilled."""


class HopperDecodeShapes:
    """Static shapes of a config; raises `ValueError` ("rule: why") for one that no kernel can be built from."""

    def __init__(self, config: HopperDecodeKernelConfig) -> None:
        self.config = config
        most = architecture("sm_90").shared_bytes_per_block - STATIC_BYTES
        if self.shared_bytes > most:
            raise ValueError(
                f"shared memory: {config} needs {self.shared_bytes} bytes; a thread block has at most {most}. "
                "Choose a smaller B_c or fewer stages"
            )
        if self.operand_registers > MOST_OPERAND_REGISTERS:
            raise ValueError(
                f"registers: O, S and P of {config} take {self.operand_registers} registers of a thread; allowed: "
                f"up to {MOST_OPERAND_REGISTERS}. Choose a smaller B_c"
            )

    def __repr__(self) -> str:
        return f"HopperDecodeShapes({self.config})"

    @property
    def threads(self) -> int:
        return (self.config.n_consumers + 1) * WARPGROUP_THREADS

    @property
    def unit_keys(self) -> int:
        """Keys of a step."""
        return self.config.B_c

    @cached_property
    def shared_layout(self) -> SharedLayout:
        """That of wgmma: panels of 64 columns, in which vectors are swizzled by the index of their row."""
        return SharedLayout.of(self.config.d_head, swizzled=True)

    @property
    def Q_bytes(self) -> int:
        """Of one consumer warpgroup's rows."""
        return WARPGROUP_ROWS * self.config.d_head * ELEMENT_BYTES

    @property
    def KV_bytes(self) -> int:
        """Of the keys of a step, or its values."""
        return self.config.B_c * self.config.d_head * ELEMENT_BYTES

    @property
    def K_offset(self) -> int:
        return self.config.n_consumers * self.Q_bytes

    @property
    def V_offset(self) -> int:
        return self.K_offset + self.config.stages * self.KV_bytes

    @property
    def barriers_offset(self) -> int:
        return self.V_offset + self.config.stages * self.KV_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one thread block."""
        return self.barriers_offset + 2 * self.config.stages * BARRIER_PAIR_BYTES

    @property
    def operand_registers(self) -> int:
        """Of a consumer thread: O, S and P, of which two numbers are in one."""
        scores = self.config.B_c * WARPGROUP_ROWS // WARPGROUP_THREADS
        return self.config.d_head * WARPGROUP_ROWS // WARPGROUP_THREADS + scores + scores // 2

    @property
    def Q_registers(self) -> int:
        """Of a consumer thread, if its rows of Q are registers."""
        return self.config.d_head * WARPGROUP_ROWS // WARPGROUP_THREADS // 2

    @property
    def Q_in_registers(self) -> bool:
        """Whether there are enough for them."""
        return self.operand_registers + self.Q_registers <= MOST_WITH_Q

    # A multiprocessor has 512 registers for each of 128 threads. At launch, all warpgroups of a thread block have the
    # same number, 168 if there are three; the producers give back what they do not need, and the consumers take it.

    @property
    def producer_registers(self) -> int:
        return 88

    @property
    def consumer_registers(self) -> int:
        return CONSUMER_REGISTERS
