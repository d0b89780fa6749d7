"""What follows from a Hopper backward config before anything is compiled: warpgroups, registers, shared memory."""

from __future__ import annotations

from functools import cached_property

from flashwright.hardware.architectures import architecture
from flashwright.hardware.units import ELEMENT_BYTES
from flashwright.kernels.backward.hopper.config import WARPGROUP_ROWS, HopperBackwardKernelConfig

WARPGROUP_THREADS = 128
PANEL_COLUMNS = 64
BARRIER_PAIR_BYTES = 16
ACCUMULATOR_VALUES = 4
"""Of a thread, in 8 columns of a product."""
NOTE_BYTES = 16
"""Of what one thread tells others of a step or of a tile."""
TILE_STAGES = 2
"""A persistent thread block is told of its next tile while the consumers need to know of this one."""
TURN_STAGES = 2
"""Consumers have a turn while the one before is passed on."""
WEIGHT_STAGES = 2
"""Of dS, and of P where it is in shared memory: products read those of a step while the next step's are written."""
MOST_OPERAND_REGISTERS = 232
"""Of the 240 that a thread of two consumer warpgroups has: addresses and counters need a few."""


class HopperBackwardShapes:
    """Static shapes of a config; raises `ValueError` ("rule: why") for one that no kernel can be built from."""

    def __init__(self, config: HopperBackwardKernelConfig) -> None:
        self.config = config
        self._check_warpgroups()
        self._check_shared_memory()
        self._check_registers()

    def __repr__(self) -> str:
        return f"HopperBackwardShapes({self.config})"

    # --- Validity --------------------------------------------------------------------------------------------------

    def _check_warpgroups(self) -> None:
        config = self.config
        if config.n_consumers % self.key_groups or self.parts not in (1, 2):
            raise ValueError(
                f"warpgroups: {config.n_consumers} do not share B_c = {config.B_c} keys; each needs {WARPGROUP_ROWS} "
                "of its own, or shares them with one other"
            )
        if config.d_head % (self.parts * PANEL_COLUMNS):
            raise ValueError(
                f"warpgroups: {self.parts} share d_head = {config.d_head} columns of dK and dV; each needs a multiple "
                f"of {PANEL_COLUMNS}"
            )
        row_groups = config.B_r // WARPGROUP_ROWS
        if config.n_consumers % row_groups or config.d_head % (self.dQ_column_parts * PANEL_COLUMNS):
            raise ValueError(
                f"warpgroups: {config.n_consumers} do not share dQ's {config.B_r} rows and {config.d_head} columns; "
                f"each needs {WARPGROUP_ROWS} rows and a multiple of {PANEL_COLUMNS} columns"
            )
        if config.P_in_registers and self.parts != 1:
            raise ValueError(
                "P in registers: two warpgroups share the same keys, each with half of the queries; dV needs all of "
                "them"
            )
        if config.paired and config.P_in_registers:
            raise ValueError("paired: P_in_registers is on; two thread blocks share dQ where P is in shared memory")
        if config.paired and self.panels != self.dQ_column_parts:
            raise ValueError(
                f"paired: two thread blocks share dQ's {config.d_head} columns in {self.dQ_column_parts} parts; each "
                f"needs {PANEL_COLUMNS}"
            )
        if config.paired and config.bulk_dQ:
            raise ValueError("paired: bulk_dQ is on; two thread blocks add to dQ from registers")
        if config.paired and config.keys_ahead:
            raise ValueError(
                "paired: keys_ahead is on; two thread blocks hold one block of K and V and half of another K"
            )
        if config.skips_masked and not (config.P_in_registers and config.B_r < config.B_c):
            in_registers = "on" if config.P_in_registers else "off"
            raise ValueError(
                f"skips masked: P_in_registers is {in_registers}, B_r = {config.B_r}, B_c = {config.B_c}; a warpgroup "
                "leaves out steps with P in registers and fewer queries than keys"
            )
        if config.keys_ahead and not config.persistent:
            raise ValueError("persistent: off, and keys_ahead is on; a thread block has no next keys to copy ahead")

        if config.finishes_dQ and config.bulk_dQ:
            raise ValueError(
                "finishes dQ: bulk_dQ is on; the last block of keys to add to a block of dQ rounds the sum in registers"
            )

    def _check_shared_memory(self) -> None:
        most = architecture("sm_90").shared_bytes_per_block
        if self.shared_bytes > most:
            raise ValueError(
                f"shared memory: {self.config} needs {self.shared_bytes} bytes; a thread block has at most {most}. "
                "Choose a smaller B_r or B_c, or fewer stages"
            )

    def _check_registers(self) -> None:
        most = MOST_OPERAND_REGISTERS + self.consumer_registers - 240
        if self.operand_registers > most:
            raise ValueError(
                f"registers: sums of products of {self.config} take {self.operand_registers} registers of a thread; "
                f"allowed: up to {most}. Choose a smaller B_r, or more consumers"
            )

    # --- Warpgroups ------------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        return (self.config.n_consumers + 1) * WARPGROUP_THREADS

    @property
    def key_groups(self) -> int:
        return self.config.B_c // WARPGROUP_ROWS

    @property
    def parts(self) -> int:
        """Warpgroups that share the same keys: queries of S and dP, columns of dK and dV."""
        return self.config.n_consumers // self.key_groups

    @property
    def together(self) -> int:
        """Thread blocks that exchange the gradients of scores."""
        return 2 if self.config.paired else 1

    @property
    def dQ_threads(self) -> int:
        """That share a block of dQ."""
        return self.together * self.config.n_consumers * WARPGROUP_THREADS

    @property
    def dQ_group_warps(self) -> int:
        """Warps that stand along its rows before the next ones go along its columns."""
        return 4

    @property
    def dQ_column_parts(self) -> int:
        return self.together * max(1, self.config.n_consumers // (self.config.B_r // WARPGROUP_ROWS))

    # --- Registers of a thread -------------------------------------------------------------------------------------

    @property
    def producer_registers(self) -> int:
        return 32 if self.config.n_consumers == 3 else 24

    @property
    def consumer_registers(self) -> int:
        return {1: 240, 2: 240, 3: 160}[self.config.n_consumers]

    @property
    def score_registers(self) -> int:
        """Of S, and again of dP."""
        return self.config.B_r // self.parts // 2

    @property
    def gradient_registers(self) -> int:
        """Of dK, and again of dV."""
        return self.config.d_head // self.parts // 2

    @property
    def dQ_registers(self) -> int:
        return self.config.d_head // self.dQ_column_parts // 2

    @property
    def operand_registers(self) -> int:
        """All at once: dK and dV, with S and dP or with dQ, P and dS; of a pair of thread blocks, with S, dP and dQ."""
        scores, rounded = 2 * self.score_registers, self.score_registers if self.config.P_in_registers else 0
        others = scores + self.dQ_registers if self.config.paired else max(scores, self.dQ_registers + rounded)
        return 2 * self.gradient_registers + others

    # --- Shared memory ---------------------------------------------------------------------------------------------

    @property
    def panels(self) -> int:
        """Stretches of 64 columns in which a tile lies in shared memory."""
        return self.config.d_head // PANEL_COLUMNS

    @property
    def key_group_bytes(self) -> int:
        """Of 64 rows of K or V."""
        return WARPGROUP_ROWS * self.config.d_head * ELEMENT_BYTES

    @property
    def query_bytes(self) -> int:
        """Of a stage of Q or dO."""
        return self.config.B_r * self.config.d_head * ELEMENT_BYTES

    @property
    def weight_stages(self) -> int:
        return WEIGHT_STAGES

    @property
    def weight_group_bytes(self) -> int:
        """Of 64 rows of P or dS."""
        return WARPGROUP_ROWS * self.config.B_r * ELEMENT_BYTES

    @property
    def terms_bytes(self) -> int:
        """Of a stage of the log-sum-exps of rows, or of their dot products: fp32 numbers."""
        return 4 * self.config.B_r

    @property
    def K_offset(self) -> int:
        return 0

    @property
    def key_stages(self) -> int:
        """Blocks of K, and of V."""
        return 2 if self.config.keys_ahead else 1

    @property
    def key_slots(self) -> int:
        """Groups of 64 rows of K, and of V, that are copied apart."""
        return self.key_stages * self.key_groups

    @property
    def V_offset(self) -> int:
        return self.key_slots * self.key_group_bytes

    @property
    def Q_offset(self) -> int:
        return 2 * self.key_slots * self.key_group_bytes

    @property
    def dO_offset(self) -> int:
        return self.Q_offset + self.config.Q_stages * self.query_bytes

    @property
    def dS_offset(self) -> int:
        return self.dO_offset + self.config.dO_stages * self.query_bytes

    @property
    def P_offset(self) -> int:
        return self.dS_offset + WEIGHT_STAGES * self.key_groups * self.weight_group_bytes

    @property
    def dQ_offset(self) -> int:
        return self.P_offset + (
            0 if self.config.P_in_registers else WEIGHT_STAGES * self.key_groups * self.weight_group_bytes
        )

    @property
    def dQ_bytes(self) -> int:
        """Of a block of dQ in fp32."""
        return 4 * self.config.B_r * self.config.d_head

    @property
    def dQ_part_bytes(self) -> int:
        """Of a warpgroup's part of it."""
        return self.dQ_bytes // self.config.n_consumers

    @property
    def dQ_slots(self) -> int:
        """Parts of dQ that are handed over apart; or turns that consumers have, turns to be passed on, and, of a pair,
        turns that have been taken."""
        turns = (2 + self.sends_turns) * TURN_STAGES if self.takes_turns else 0
        return self.config.n_consumers if self.config.bulk_dQ else turns

    @property
    def received_offset(self) -> int:
        """Of dS of the other thread block."""
        return self.dQ_offset + (self.dQ_bytes if self.config.bulk_dQ else 0)

    @property
    def other_K_offset(self) -> int:
        """Of the columns of the other thread block's K that this one multiplies."""
        return self.received_offset + (
            WEIGHT_STAGES * self.key_groups * self.weight_group_bytes if self.config.paired else 0
        )

    @property
    def other_K_bytes(self) -> int:
        """Of 64 rows of the columns of the other thread block's K."""
        return self.key_group_bytes // self.together

    @property
    def lse_offset(self) -> int:
        return self.other_K_offset + (self.key_groups * self.other_K_bytes if self.config.paired else 0)

    @property
    def dots_offset(self) -> int:
        return self.lse_offset + self.config.Q_stages * self.terms_bytes

    @property
    def notes_offset(self) -> int:
        return self.dots_offset + self.config.dO_stages * self.terms_bytes

    @property
    def takes_turns(self) -> bool:
        """Whether consumers wait for turns to add to dQ from their registers."""
        return (self.config.ordered or self.config.finishes_dQ) and not self.config.bulk_dQ

    @property
    def sends_turns(self) -> bool:
        """Whether the first thread block of a pair takes a turn for both."""
        return self.config.paired and self.takes_turns and not self.config.ordered

    @property
    def turns_offset(self) -> int:
        """Of what is known of a turn, where the last finishes dQ."""
        return self.notes_offset + 2 * self.config.Q_stages * NOTE_BYTES

    @property
    def taken_turns_offset(self) -> int:
        return self.turns_offset + (TURN_STAGES * NOTE_BYTES if self.config.finishes_dQ else 0)

    @property
    def turn_stages(self) -> int:
        return TURN_STAGES

    @property
    def announces_tiles(self) -> bool:
        """Whether the thread that copies takes tiles from a common count and tells the others."""
        return self.config.persistent

    @property
    def tile_stages(self) -> int:
        return TILE_STAGES

    @property
    def tiles_offset(self) -> int:
        """Of what a persistent thread block is told of its tiles."""
        return self.taken_turns_offset + (TURN_STAGES * NOTE_BYTES if self.sends_turns else 0)

    @property
    def barriers_offset(self) -> int:
        return self.tiles_offset + (TILE_STAGES * NOTE_BYTES if self.announces_tiles else 0)

    @cached_property
    def shared_bytes(self) -> int:
        stages = self.config.Q_stages + self.config.dO_stages
        pairs = 2 * self.key_slots + self.key_groups + stages + self.dQ_slots + 2 * WEIGHT_STAGES
        pairs += TILE_STAGES if self.announces_tiles else 0
        return self.barriers_offset + pairs * BARRIER_PAIR_BYTES

    @property
    def finds_again(self) -> bool:
        """Whether descriptors of K and V are found where they are used: P in shared memory, and the places of a tile of
        a persistent thread block, leave the loop no registers to keep them, and behind the branch to a step that is
        left out they are not known to be the same for a warp. Where turns are waited for, a longer step costs more than
        the registers bring."""
        config = self.config
        return not config.P_in_registers or config.skips_masked or (config.persistent and not self.takes_turns)

    @property
    def term_tiles(self) -> int:
        """Of the tiles of 8 queries of a warpgroup's scores: those whose log-sum-exps are read before the products, and
        whose O·dO before dP is waited for. All, if they are few and the registers of descriptors are free; or half."""
        tiles = self.score_registers // ACCUMULATOR_VALUES
        has_room = self.config.P_in_registers and self.config.persistent and self.finds_again
        return tiles if has_room and tiles <= 8 else tiles // 2

    @property
    def P_in_registers(self) -> bool:
        return self.config.P_in_registers
