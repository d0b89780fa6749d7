"""What follows from an Ampere backward config before anything is compiled: warps, registers, shared memory."""

from __future__ import annotations

from functools import cached_property

from flashwright.hardware.units import ELEMENT_BYTES, MMA_ROWS, WARP_THREADS
from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.shared_layout import MOST_SHARED_BYTES, SharedLayout

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
        if config.B_c % self.keys_per_warp or config.n_warps % self.key_groups:
            raise ValueError(
                f"warps: {config.n_warps} warps do not share B_c = {config.B_c} keys evenly, {MMA_ROWS} or more each"
            )
        if self.parts not in (1, 2) or config.B_r % (self.parts * MMA_ROWS):
            raise ValueError(
                f"warps: {config.n_warps} warps at B_c = {config.B_c} keys, B_r = {config.B_r} queries: "
                f"{self.parts} warps would share the same keys; allowed: 1, or 2 if they have {MMA_ROWS} queries each"
            )
        if self.dQ_row_groups * MMA_ROWS > config.B_r or config.n_warps % self.dQ_row_groups:
            raise ValueError(f"warps: {config.n_warps} warps do not share B_r = {config.B_r} rows of dQ evenly")

    def _check_columns(self) -> None:
        config = self.config
        columns = config.d_head // self.parts
        if columns % (TILES_PER_STORE * MMA_COLUMNS):
            raise ValueError(
                f"columns: {self.parts} warps share d_head = {config.d_head} columns of dK and dV; each needs a "
                f"multiple of {TILES_PER_STORE * MMA_COLUMNS}"
            )
        if config.d_head % (self.dQ_column_parts * MMA_ROWS):
            raise ValueError(
                f"columns: {self.dQ_column_parts} warps share d_head = {config.d_head} columns of dQ; each needs a "
                f"multiple of {MMA_ROWS}"
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
    def keys_per_warp(self) -> int:
        return max(MMA_ROWS, self.config.B_c // self.config.n_warps)

    @property
    def row_tiles(self) -> int:
        return self.keys_per_warp // MMA_ROWS

    @property
    def key_groups(self) -> int:
        return self.config.B_c // self.keys_per_warp

    @property
    def parts(self) -> int:
        """Warps that share the same keys: queries of S and dP, columns of dK and dV."""
        return self.config.n_warps // self.key_groups

    @property
    def weights_in_registers(self) -> bool:
        """Whether P and dS are left operands where they were computed: a warp has those of all queries."""
        return self.parts == 1

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
        """Of warps along the rows of dQ."""
        return min(self.config.n_warps, self.config.B_r // MMA_ROWS)

    @property
    def dQ_column_parts(self) -> int:
        return self.config.n_warps // self.dQ_row_groups

    # --- Registers of a thread -------------------------------------------------------------------------------------

    @property
    def score_registers(self) -> int:
        """Of S, and again of dP."""
        return self.keys_per_warp * self.config.B_r // self.parts // WARP_THREADS

    @property
    def gradient_registers(self) -> int:
        """Of dK, and again of dV."""
        return self.keys_per_warp * self.config.d_head // self.parts // WARP_THREADS

    @property
    def dQ_registers(self) -> int:
        return self.config.B_r * self.config.d_head // self.threads

    # --- Shared memory ---------------------------------------------------------------------------------------------

    @cached_property
    def shared_layout(self) -> SharedLayout:
        """Of all blocks: panels of columns, of which a warp has whole ones."""
        config = self.config
        return SharedLayout.of(
            config.d_head, config.d_head // self.parts, config.d_head // self.dQ_column_parts, config.B_r,
            swizzled=config.swizzled,
        )  # fmt: skip

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
        """Of dS, and of P where it is not in registers."""
        return self.config.B_c * self.config.B_r * ELEMENT_BYTES

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
        return self.dS_offset + self.weight_bytes

    @property
    def terms_offset(self) -> int:
        return self.P_offset + (0 if self.weights_in_registers else self.weight_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.terms_offset + self.config.Q_stages * self.terms_bytes
