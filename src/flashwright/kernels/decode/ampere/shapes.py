"""What follows from an Ampere decode config before anything is compiled: warps, registers, shared memory."""

from __future__ import annotations

from functools import cached_property

from flashwright.hardware.units import ELEMENT_BYTES, MMA_ROWS, WARP_THREADS
from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.shared_layout import MOST_SHARED_BYTES, SharedLayout

MOST_ACCUMULATORS = 200
"""Registers of a thread for O and S."""


class AmpereDecodeShapes:
    """Static shapes of a config; raises `ValueError` ("rule: why") for one that no kernel can be built from."""

    def __init__(self, config: AmpereDecodeKernelConfig) -> None:
        self.config = config
        if config.n_warps % config.row_warps:
            raise ValueError(f"warps: {config.n_warps} are not a multiple of row_warps = {config.row_warps}")
        if config.B_r % (config.row_warps * MMA_ROWS):
            raise ValueError(
                f"warps: {config.row_warps} along B_r = {config.B_r} rows; each needs a multiple of {MMA_ROWS} of its "
                "own"
            )
        if self.shared_bytes > MOST_SHARED_BYTES:
            raise ValueError(
                f"shared memory: {config} needs {self.shared_bytes} bytes; a thread block has at most "
                f"{MOST_SHARED_BYTES} on any GPU. Choose fewer stages, warps or keys_per_warp"
            )
        if self.O_registers + self.S_registers > MOST_ACCUMULATORS:
            raise ValueError(
                f"registers: O and S of {config} take {self.O_registers} + {self.S_registers} registers of a thread; "
                f"allowed: up to {MOST_ACCUMULATORS}. Choose more row_warps or a smaller B_r"
            )

    def __repr__(self) -> str:
        return f"AmpereDecodeShapes({self.config})"

    @property
    def threads(self) -> int:
        return self.config.n_warps * WARP_THREADS

    @property
    def key_warps(self) -> int:
        """Warps with different keys."""
        return self.config.n_warps // self.config.row_warps

    @property
    def unit_keys(self) -> int:
        """Keys of a step."""
        return self.config.B_c

    @property
    def row_tiles(self) -> int:
        """Of 16 rows, of a warp."""
        return self.config.B_r // self.config.row_warps // MMA_ROWS

    @property
    def O_registers(self) -> int:
        return self.row_tiles * MMA_ROWS * self.config.d_head // WARP_THREADS

    @property
    def S_registers(self) -> int:
        return self.row_tiles * MMA_ROWS * self.config.keys_per_warp // WARP_THREADS

    @cached_property
    def shared_layout(self) -> SharedLayout:
        return SharedLayout.of(self.config.d_head, swizzled=self.config.swizzled)

    @property
    def chunk_bytes(self) -> int:
        """Of a warp's keys and values in a stage."""
        return 2 * self.config.keys_per_warp * self.config.d_head * ELEMENT_BYTES

    @property
    def Q_bytes(self) -> int:
        """Of the rows of a segment. There are as many of them as stages: copies run ahead into the next segments."""
        return self.config.B_r * self.config.d_head * ELEMENT_BYTES

    @property
    def stages_offset(self) -> int:
        return self.config.stages * self.Q_bytes

    @property
    def results_in_stages(self) -> bool:
        """Whether a warp's rows of O in fp32 find room in a stage, where its keys and values were."""
        return self.config.B_r <= self.config.keys_per_warp

    @property
    def results_offset(self) -> int:
        return self.stages_offset + self.config.stages * self.key_warps * self.chunk_bytes

    @property
    def terms_offset(self) -> int:
        results = 0 if self.results_in_stages else self.key_warps * self.config.B_r * self.config.d_head * 4
        return self.results_offset + results

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one thread block."""
        return self.terms_offset + self.key_warps * self.config.B_r * 8
