"""What follows from an Ampere backward config before anything is compiled: warps, registers, shared memory."""

from __future__ import annotations

from functools import cached_property

from flashwright.hardware.units import ELEMENT_BYTES, MMA_ROWS, WARP_THREADS
from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.shared_layout import MOST_PANEL_COLUMNS, MOST_SHARED_BYTES, SharedLayout

MMA_COLUMNS = 8
TILES_PER_STORE = 4
"""8-column tiles of a gradient that a quad of lanes stores at once."""
MOST_ACCUMULATORS = 288
"""Registers of a thread for sums of products. A thread has 255; a few more than that spill, and still work."""


class AmpereBackwardShapes:
    """Static shapes of a config; raises `ValueError` ("rule: why") for one that no kernel can be built from."""

    def __init__(self, config: AmpereBackwardKernelConfig) -> None:
        self.config = config
        self._check_warps()
        self._check_columns()
        self._check_shared_memory()
        self._check_accumulators()

    def __repr__(self) -> str:
        return f"AmpereBackwardShapes({self.config})"

    # --- Validity --------------------------------------------------------------------------------------------------

    def _check_warps(self) -> None:
        config = self.config
        if config.n_warps % config.parts or config.B_c % (self.key_groups * MMA_ROWS):
            raise ValueError(
                f"warps: {config.n_warps} warps do not share B_c = {config.B_c} keys evenly, {config.parts} to the "
                f"same keys and {MMA_ROWS} keys or a multiple for each"
            )
        if config.B_r % (config.parts * config.slices * MMA_ROWS):
            raise ValueError(
                f"warps: {config.parts} parts and {config.slices} slices do not share B_r = {config.B_r} queries "
                f"evenly, {MMA_ROWS} or a multiple for each"
            )
        if not self._dQ_divisions:
            raise ValueError(
                f"warps: {config.n_warps} warps do not share B_r = {config.B_r} rows and d_head = {config.d_head} "
                f"columns of dQ evenly, {MMA_ROWS} or a multiple for each"
            )

    def _check_columns(self) -> None:
        config = self.config
        columns = config.d_head // config.parts
        if columns % (TILES_PER_STORE * MMA_COLUMNS):
            raise ValueError(
                f"columns: {config.parts} warps share d_head = {config.d_head} columns of dK and dV; each needs a "
                f"multiple of {TILES_PER_STORE * MMA_COLUMNS}"
            )

    def _check_shared_memory(self) -> None:
        if self.shared_bytes > MOST_SHARED_BYTES:
            raise ValueError(
                f"shared memory: {self.config} needs {self.shared_bytes} bytes; a thread block has at most "
                f"{MOST_SHARED_BYTES} on any GPU. Choose a smaller B_r or B_c, or fewer stages"
            )

    def _check_accumulators(self) -> None:
        held = 2 * self.gradient_registers
        working = max(2 * self.score_registers, self.dQ_registers)
        if held + working > MOST_ACCUMULATORS:
            raise ValueError(
                f"registers: dK and dV of {self.config} take {held} registers of a thread, S and dP or dQ {working} "
                f"more; allowed: up to {MOST_ACCUMULATORS} (a thread has 255, and spills the rest). Choose a smaller "
                "B_r or more warps"
            )

    # --- Warps -----------------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return self.config.n_warps * WARP_THREADS

    @property
    def key_groups(self) -> int:
        """Groups of warps along the keys."""
        return self.config.n_warps // self.config.parts

    @property
    def keys_per_warp(self) -> int:
        return self.config.B_c // self.key_groups

    @property
    def row_tiles(self) -> int:
        return self.keys_per_warp // MMA_ROWS

    @property
    def slice_queries(self) -> int:
        """Queries of a warp for which it computes S and dP at a time."""
        return self.config.B_r // (self.config.parts * self.config.slices)

    @property
    def dQ_threads(self) -> int:
        """That share a block of dQ."""
        return self.threads

    @property
    def dQ_group_warps(self) -> int:
        """Warps that stand along its rows before the next ones go along its columns."""
        return 1

    @property
    def dQ_row_groups(self) -> int:
        """Of warps along the rows of dQ: as many as leave each the squarest part of it, which reads least of dS, K."""
        return min(self._dQ_divisions, key=self._dQ_operand_rows)

    @property
    def dQ_column_parts(self) -> int:
        return self.config.n_warps // self.dQ_row_groups

    @property
    def _dQ_divisions(self) -> list[int]:
        """Numbers of groups along the rows of dQ that leave every warp whole tiles."""
        config = self.config
        return [
            groups
            for groups in range(1, config.n_warps + 1)
            if config.n_warps % groups == 0
            and config.B_r % (groups * MMA_ROWS) == 0
            and config.d_head % (config.n_warps // groups * MMA_ROWS) == 0
        ]

    def _dQ_operand_rows(self, groups: int) -> int:
        return self.config.B_r // groups + self.config.d_head * groups // self.config.n_warps

    # --- Registers of a thread -------------------------------------------------------------------------------------

    @property
    def score_registers(self) -> int:
        """Of a slice of S, and again of dP."""
        return self.keys_per_warp * self.slice_queries // WARP_THREADS

    @property
    def gradient_registers(self) -> int:
        """Of dK, and again of dV."""
        return self.keys_per_warp * self.config.d_head // self.config.parts // WARP_THREADS

    @property
    def dQ_registers(self) -> int:
        return self.config.B_r * self.config.d_head // self.threads

    # --- Shared memory ---------------------------------------------------------------------------------------------

    @cached_property
    def shared_layout(self) -> SharedLayout:
        """Of all blocks. A warp's columns are whole panels, or lie within one."""
        config = self.config
        of_a_warp = (
            config.d_head // config.parts, config.d_head // self.dQ_column_parts,
            config.B_r // config.parts, self.slice_queries, config.B_r // self.dQ_row_groups,
        )  # fmt: skip
        return SharedLayout.of(
            config.d_head,
            config.B_r,
            *(columns for columns in of_a_warp if MOST_PANEL_COLUMNS % columns),
            swizzled=config.swizzled,
        )

    @property
    def key_bytes(self) -> int:
        """Of K, and again of V."""
        return self.config.B_c * self.config.d_head * ELEMENT_BYTES

    @property
    def query_bytes(self) -> int:
        """Of a stage of Q or dO."""
        return self.config.B_r * self.config.d_head * ELEMENT_BYTES

    @property
    def weight_bytes(self) -> int:
        """Of a buffer of dS, and of P where warps share keys."""
        return self.config.B_c * self.config.B_r * ELEMENT_BYTES

    @property
    def dS_buffers(self) -> int:
        return 2 if self.config.late_dQ else 1

    @property
    def terms_bytes(self) -> int:
        """Of a stage of what is known of each row of Q: two fp32 numbers."""
        return 8 * self.config.B_r

    @property
    def K_offset(self) -> int:
        return 0

    @property
    def V_offset(self) -> int:
        return self.key_bytes

    @property
    def Q_offset(self) -> int:
        return 2 * self.key_bytes

    @property
    def dO_offset(self) -> int:
        return self.Q_offset + self.config.Q_stages * self.query_bytes

    @property
    def dS_offset(self) -> int:
        return self.dO_offset + self.config.dO_stages * self.query_bytes

    @property
    def P_offset(self) -> int:
        return self.dS_offset + self.dS_buffers * self.weight_bytes

    @property
    def terms_offset(self) -> int:
        return self.P_offset + (0 if self.config.parts == 1 else self.weight_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.terms_offset + self.config.Q_stages * self.terms_bytes
