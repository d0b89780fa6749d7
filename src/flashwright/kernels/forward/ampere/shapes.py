"""The static shapes a config implies: tiles, register buffers, shared memory; and whether a kernel can be built.

Everything here is arithmetic on the config, done before anything is compiled. The device code receives the
results as constants (see `source`) and derives nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flashwright.hardware.units import (
    ELEMENT_BYTES,
    FRAGMENT,
    MAX_BLOCK_THREADS,
    MMA_K,
    MMA_ROWS,
    WARP_THREADS,
)
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.shared_layout import MOST_SHARED_BYTES, SharedLayout

RING_BARRIERS_BYTES = 16
"""Of one stage: two barriers of 8 bytes."""
MOST_ACCUMULATORS = 512
"""fp32 accumulators of S and O per thread, which has 255 registers: a kernel that needs more than twice as many takes
minutes to compile, and spills everything."""


@dataclass(frozen=True)
class GemmShape:
    """One of the two matrix products C = A·B, walked along K in register tiles."""

    tile_fragments: int
    """8-wide fragments along K per register tile."""
    tiles: int
    A_load_entire_block_into_rf: bool
    B_load_entire_block_into_rf: bool
    A_rmem_tile_buffers: int
    B_rmem_tile_buffers: int

    @property
    def mma_steps_per_tile(self) -> int:
        """Times that an `mma` goes along K within a register tile."""
        return self.tile_fragments * FRAGMENT // MMA_K

    @property
    def DoubleBufferA(self) -> bool:
        return not self.A_load_entire_block_into_rf and self.A_rmem_tile_buffers > 1

    @property
    def DoubleBufferB(self) -> bool:
        return not self.B_load_entire_block_into_rf and self.B_rmem_tile_buffers > 1

    @property
    def DoubleBuffer(self) -> bool:
        return self.DoubleBufferA or self.DoubleBufferB


class ForwardKernelTileShapes:
    """Shapes, buffers and sizes derived from a config; raises `ValueError` ("rule: why") for an invalid one."""

    def __init__(self, config: FlashForwardKernelConfig) -> None:
        self.config = config
        self._check_warps()
        self._check_stages()
        self._check_load_tiles("Q_mma_load_K_tiles", "d_head")
        self._check_load_tiles("K_mma_load_K_tiles", "d_head")
        self._check_load_tiles("V_mma_load_K_tiles", "B_c")
        self._check_shared_memory()
        self._check_accumulators()

    def __repr__(self) -> str:
        return f"ForwardKernelTileShapes({self.config})"

    # --- Validity ------------------------------------------------------------------------------------------

    def _check_warps(self) -> None:
        B_r, n_warps = self.config.B_r, self.config.n_warps
        if B_r % (n_warps * MMA_ROWS):
            raise ValueError(
                f"warps: B_r = {B_r} with n_warps = {n_warps} gives a warp {B_r / n_warps:g} rows; "
                f"an mma needs a multiple of {MMA_ROWS}"
            )
        if self.threads > MAX_BLOCK_THREADS:
            raise ValueError(
                f"warps: n_warps = {n_warps} are {self.threads} threads; allowed: up to {MAX_BLOCK_THREADS} threads"
            )

    def _check_stages(self) -> None:
        if self.config.two_kv_stages and not self.config.eager_load_blocks:
            raise ValueError(
                "stages: two_kv_stages is on and eager_load_blocks is off; "
                "a second stage serves only copies that start early"
            )
        ring = self.config.ring_stages
        if ring and not (self.config.eager_load_blocks and self.config.async_copy):
            raise ValueError(
                f"stages: ring_stages = {ring} needs async_copy and eager_load_blocks; "
                "a ring is filled by asynchronous copies that start early"
            )
        if ring and self.config.two_kv_stages:
            raise ValueError(
                f"stages: ring_stages = {ring} and two_kv_stages are two ways to stage K and V; choose one"
            )

    def _check_load_tiles(self, field: str, k_field: str) -> None:
        tiles = getattr(self.config, field)
        if tiles == 0:
            return
        if tiles < 2 or tiles & (tiles - 1):
            raise ValueError(f"load tiles: {field}: {tiles} is not allowed; allowed: 0, or a power of two from 2")
        K = getattr(self.config, k_field)
        buffers = 2 if self.config.mma_double_buffer_loads else 1
        most = K // (FRAGMENT * buffers)
        if tiles > most:
            why = " with mma_double_buffer_loads (two tiles must fit)" if buffers == 2 else ""
            raise ValueError(
                f"load tiles: {field}: {tiles} fragments are more than {k_field}/{FRAGMENT * buffers} = {most} "
                f"({k_field} = {K}){why}"
            )
        if (K // FRAGMENT) % tiles:
            raise ValueError(
                f"load tiles: {field}: {tiles} does not divide the {K // FRAGMENT} fragments of {k_field} = {K}"
            )

    def _check_shared_memory(self) -> None:
        if self.shared_bytes > MOST_SHARED_BYTES:
            raise ValueError(
                f"shared memory: {self.config} needs {self.shared_bytes} bytes; a thread block has at most "
                f"{MOST_SHARED_BYTES} on any GPU. Choose a smaller B_r or B_c"
            )

    def _check_accumulators(self) -> None:
        of_S, of_O = self.S_accumulator_registers, self.O_accumulator_registers
        if of_S + of_O > MOST_ACCUMULATORS:
            raise ValueError(
                f"registers: S and O of {self.config} take {of_S} + {of_O} registers of a thread; allowed: up to "
                f"{MOST_ACCUMULATORS} (a thread has 255, and spills the rest). Choose a smaller B_r or more warps"
            )

    # --- The seed system's names ---------------------------------------------------------------------------

    @property
    def d_head_fragments(self) -> int:
        return self.config.d_head // FRAGMENT

    @property
    def QO_rows_per_warp(self) -> int:
        return self.config.B_r // self.config.n_warps

    @property
    def QO_fragments_per_warp(self) -> int:
        return self.QO_rows_per_warp // FRAGMENT

    @property
    def KV_calc_fragments(self) -> int:
        """Fragments along B_c: every warp computes with all of a K/V block."""
        return self.config.B_c // FRAGMENT

    @property
    def KV_ldst_fragments_per_warp(self) -> int:
        """A warp's share of copying a K/V block, in fragments of 8 rows, rounded up: where 8 warps copy 32 rows, two of
        them share a fragment, and have 4 rows each."""
        return -(-self.KV_calc_fragments // self.config.n_warps)

    @property
    def QK_rmem_tile_fragments(self) -> int:
        return max(self.config.Q_mma_load_K_tiles, self.config.K_mma_load_K_tiles) or self.d_head_fragments

    @property
    def PV_rmem_tile_fragments(self) -> int:
        return self.config.V_mma_load_K_tiles or self.KV_calc_fragments

    @property
    def QK_rmem_tiles(self) -> int:
        return self.d_head_fragments // self.QK_rmem_tile_fragments

    @property
    def PV_rmem_tiles(self) -> int:
        return self.KV_calc_fragments // self.PV_rmem_tile_fragments

    @property
    def Q_rmem_tile_buffers(self) -> int:
        return self._buffers(self.config.Q_mma_load_K_tiles, self.QK_rmem_tiles)

    @property
    def K_rmem_tile_buffers(self) -> int:
        return self._buffers(self.config.K_mma_load_K_tiles, self.QK_rmem_tiles)

    @property
    def V_rmem_tile_buffers(self) -> int:
        return self._buffers(self.config.V_mma_load_K_tiles, self.PV_rmem_tiles)

    def _buffers(self, load_tiles: int, all_tiles: int) -> int:
        if load_tiles == 0:
            return all_tiles
        return 2 if self.config.mma_double_buffer_loads else 1

    @cached_property
    def QK(self) -> GemmShape:
        """S = QKᵀ, walked along d_head."""
        return GemmShape(
            tile_fragments=self.QK_rmem_tile_fragments,
            tiles=self.QK_rmem_tiles,
            A_load_entire_block_into_rf=self.config.Q_mma_load_K_tiles == 0,
            B_load_entire_block_into_rf=self.config.K_mma_load_K_tiles == 0,
            A_rmem_tile_buffers=self.Q_rmem_tile_buffers,
            B_rmem_tile_buffers=self.K_rmem_tile_buffers,
        )

    @cached_property
    def PV(self) -> GemmShape:
        """O += PV, walked along B_c. P is computed in registers and so is always there as a whole."""
        return GemmShape(
            tile_fragments=self.PV_rmem_tile_fragments,
            tiles=self.PV_rmem_tiles,
            A_load_entire_block_into_rf=True,
            B_load_entire_block_into_rf=self.config.V_mma_load_K_tiles == 0,
            A_rmem_tile_buffers=self.PV_rmem_tiles,
            B_rmem_tile_buffers=self.V_rmem_tile_buffers,
        )

    # --- Threads and registers -----------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return self.config.n_warps * WARP_THREADS

    @property
    def S_accumulator_registers(self) -> int:
        """fp32 registers per thread for a warp's part of S."""
        return self.QO_rows_per_warp * self.config.B_c // WARP_THREADS

    @property
    def O_accumulator_registers(self) -> int:
        return self.QO_rows_per_warp * self.config.d_head // WARP_THREADS

    @property
    def P_operand_registers(self) -> int:
        """P takes over S's values at 16 bits, two to a register."""
        return self.S_accumulator_registers // 2

    @property
    def Q_operand_registers(self) -> int:
        return self._operand_registers(self.QO_rows_per_warp, self.QK_rmem_tile_fragments, self.Q_rmem_tile_buffers)

    @property
    def K_operand_registers(self) -> int:
        return self._operand_registers(self.config.B_c, self.QK_rmem_tile_fragments, self.K_rmem_tile_buffers)

    @property
    def V_operand_registers(self) -> int:
        return self._operand_registers(self.config.d_head, self.PV_rmem_tile_fragments, self.V_rmem_tile_buffers)

    @property
    def recomputes_copy_offsets(self) -> bool:
        """Whether a thread finds its part of a copy anew in every step. Beyond 128 columns, O leaves no registers to
        keep it; up to 128, finding it anew makes the ladder's last rung spill on sm_90."""
        return self.config.d_head > 128

    @staticmethod
    def _operand_registers(outer: int, tile_fragments: int, buffers: int) -> int:
        elements = outer * tile_fragments * FRAGMENT * buffers
        return elements * ELEMENT_BYTES // (4 * WARP_THREADS)

    # --- Shared memory -------------------------------------------------------------------------------------

    @cached_property
    def shared_layout(self) -> SharedLayout:
        return SharedLayout.of(self.config.d_head, swizzled=self.config.swizzled)

    @property
    def Q_shared_bytes(self) -> int:
        """Also O's: a warp writes its rows of O over its rows of Q at the end."""
        return self.config.B_r * self.config.d_head * ELEMENT_BYTES

    @property
    def KV_shared_bytes(self) -> int:
        """Of K, and again of V."""
        return self.config.B_c * self.config.d_head * ELEMENT_BYTES

    @property
    def KV_stages(self) -> int:
        return self.config.ring_stages or (2 if self.config.two_kv_stages else 1)

    @property
    def KV_stage_bytes(self) -> int:
        """Of one K block and one V block, side by side."""
        return 2 * self.KV_shared_bytes

    @property
    def K_shared_offset(self) -> int:
        return self.Q_shared_bytes

    @property
    def V_shared_offset(self) -> int:
        return self.K_shared_offset + self.KV_shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one thread block."""
        return self.ring_barriers_offset + self.config.ring_stages * RING_BARRIERS_BYTES

    # --- The ring ------------------------------------------------------------------------------------------

    @property
    def ring_barriers_offset(self) -> int:
        """Behind all blocks: of each stage, the barrier that its copies arrive at and the one that its readers do."""
        return self.Q_shared_bytes + self.KV_stages * self.KV_stage_bytes

    @property
    def steps_ahead(self) -> int:
        """How many steps ahead of its use a block's copy starts. Two stages less than the ring has, so that a stage is
        refilled a step after its last reader, who may be late by that much; one at least."""
        return max(1, self.config.ring_stages - 2)
