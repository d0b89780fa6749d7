"""What follows from a latent decode config before anything is compiled: threads, registers, shared memory."""

from __future__ import annotations

from functools import cached_property

from flashwright.hardware.architectures import architecture
from flashwright.hardware.units import ELEMENT_BYTES
from flashwright.kernels.decode.latent.config import CONSUMERS, D_VALUE, LatentDecodeKernelConfig
from flashwright.kernels.shared_layout import SharedLayout

WARPGROUP_THREADS = 128
PAIR_BYTES = 8
"""Of two fp32 numbers."""
PARTS = 3
"""Of a stage: the values of either consumer, and what is no value."""
BARRIER_PAIR_BYTES = 16
STATIC_BYTES = 1024
"""More than the kernel has beside its dynamic shared memory."""


class LatentDecodeShapes:
    """Static shapes of a config; raises `ValueError` ("rule: why") for one that no kernel can be built from."""

    def __init__(self, config: LatentDecodeKernelConfig) -> None:
        self.config = config
        most = architecture("sm_90").shared_bytes_per_block - STATIC_BYTES
        if self.shared_bytes > most:
            raise ValueError(
                f"shared memory: {config} needs {self.shared_bytes} bytes; a thread block has at most {most}. "
                "Choose a smaller B_c or fewer stages"
            )

    def __repr__(self) -> str:
        return f"LatentDecodeShapes({self.config})"

    @property
    def threads(self) -> int:
        return (CONSUMERS + 1) * WARPGROUP_THREADS

    @property
    def unit_keys(self) -> int:
        """Keys of a step."""
        return self.config.B_c

    @property
    def d_value(self) -> int:
        """Columns of O."""
        return D_VALUE

    @cached_property
    def shared_layout(self) -> SharedLayout:
        """That of wgmma: panels of 64 columns, in which vectors are swizzled by the index of their row."""
        return SharedLayout.of(self.config.d_head, swizzled=True)

    @property
    def Q_bytes(self) -> int:
        return self.config.B_r * self.config.d_head * ELEMENT_BYTES

    @property
    def K_bytes(self) -> int:
        """Of the keys of a step."""
        return self.config.B_c * self.config.d_head * ELEMENT_BYTES

    @property
    def P_bytes(self) -> int:
        """Of the weights of a step, which one consumer hands to the other."""
        return self.config.B_r * self.config.B_c * ELEMENT_BYTES

    @property
    def K_offset(self) -> int:
        return self.Q_bytes

    @property
    def P_offset(self) -> int:
        return self.K_offset + self.config.stages * self.K_bytes

    @property
    def factors_offset(self) -> int:
        """What rows of O shrink by: two of each thread of a warpgroup."""
        return self.P_offset + self.P_bytes

    @property
    def terms_offset(self) -> int:
        """Maxima and sums of rows."""
        return self.factors_offset + WARPGROUP_THREADS * PAIR_BYTES

    @property
    def barriers_offset(self) -> int:
        return self.terms_offset + self.config.B_r * PAIR_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one thread block."""
        return self.barriers_offset + PARTS * self.config.stages * BARRIER_PAIR_BYTES

    # At launch, all three warpgroups have 168 registers a thread, 504 in all. The producers give back what they do not
    # need, and the consumers take it.

    @property
    def producer_registers(self) -> int:
        return 72

    @property
    def consumer_registers(self) -> int:
        return 216
