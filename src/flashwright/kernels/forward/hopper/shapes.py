"""What follows from a Hopper config before anything is compiled: shared memory, threads, registers."""

from __future__ import annotations

from functools import cached_property

from flashwright.hardware.architectures import architecture
from flashwright.kernels.forward.hopper.config import MAX_CONSUMERS, WARPGROUP_ROWS, HopperForwardKernelConfig

WARPGROUP_THREADS = 128
PANEL_COLUMNS = 64
PANEL_ROW_BYTES = 128
"""A row of 64 16-bit columns: the span of the copy engine's widest swizzle."""
BARRIER_PAIR_BYTES = 16
TILE_STAGES = 2
"""Tiles that the scheduler may announce ahead."""
TILE_BYTES = 16
"""Of an announcement."""
KEYS_WITH_CARE = 128
"""Of each row: a softmax that guesses finds its reference among them."""


def blocks_with_care(block_keys: int, *, first_leads: bool) -> int:
    """Of each row, the blocks from its last key on that a softmax that guesses searches for maxima. A first block that
    leads is one more, and always searched."""
    blocks = -(-KEYS_WITH_CARE // block_keys)
    return max(1, blocks - 1) if first_leads else blocks


def shares_dominance(d_head: int) -> bool:
    """Whether the threads of a row tell each other that a key dominates it, which takes two registers. With 128 columns
    late-peak scores gained 0 and 3% in two problems on an H200, and scores that spread lost up to 5%."""
    return d_head <= 64


class HopperTileShapes:
    """Static shapes of a config; raises `ValueError` for one that no multiprocessor can hold."""

    def __init__(self, config: HopperForwardKernelConfig) -> None:
        self.config = config
        most = architecture("sm_90").shared_bytes_per_block
        if self.shared_bytes > most:
            raise ValueError(
                f"{config} needs {self.shared_bytes} bytes of shared memory; a thread block has at most {most}. "
                "Choose a smaller B_c or fewer kv_stages."
            )

    @property
    def threads(self) -> int:
        return (self.config.n_consumers + 1) * WARPGROUP_THREADS

    @property
    def panels(self) -> int:
        """Stretches of 64 columns in which a tile lies in shared memory."""
        return -(-self.config.d_head // PANEL_COLUMNS)

    @property
    def half_block(self) -> int:
        """Keys of about half a block, in whole steps of the product that sums over them."""
        return -(-self.config.B_c // 2 // 16) * 16

    @property
    def Q_bytes(self) -> int:
        """Of one consumer warpgroup's rows."""
        return WARPGROUP_ROWS * self.panels * PANEL_ROW_BYTES

    @property
    def KV_bytes(self) -> int:
        """Of one K or V block."""
        return self.config.B_c * self.panels * PANEL_ROW_BYTES

    @cached_property
    def Q_stages(self) -> int:
        """Two where shared memory has room: the next tile's rows are copied while this tile's are read. Three consumer
        warpgroups leave a thread no register for the number of its stage."""
        if not self.config.persistent or self.config.n_consumers == MAX_CONSUMERS:
            return 1
        tiles = 2 * self.config.n_consumers * self.Q_bytes + 2 * self.config.kv_stages * self.KV_bytes
        slots = 2 * self.config.n_consumers + 2 * self.config.kv_stages + TILE_STAGES
        needed = tiles + slots * BARRIER_PAIR_BYTES + TILE_STAGES * TILE_BYTES
        return 2 if needed <= architecture("sm_90").shared_bytes_per_block else 1

    @property
    def K_offset(self) -> int:
        return self.Q_stages * self.config.n_consumers * self.Q_bytes

    @property
    def V_offset(self) -> int:
        return self.K_offset + self.config.kv_stages * self.KV_bytes

    @property
    def Q_barriers_offset(self) -> int:
        return self.V_offset + self.config.kv_stages * self.KV_bytes

    @property
    def K_barriers_offset(self) -> int:
        return self.Q_barriers_offset + self.Q_stages * self.config.n_consumers * BARRIER_PAIR_BYTES

    @property
    def V_barriers_offset(self) -> int:
        return self.K_barriers_offset + self.config.kv_stages * BARRIER_PAIR_BYTES

    @property
    def tile_barriers_offset(self) -> int:
        return self.V_barriers_offset + self.config.kv_stages * BARRIER_PAIR_BYTES

    @property
    def tiles_offset(self) -> int:
        return self.tile_barriers_offset + TILE_STAGES * BARRIER_PAIR_BYTES

    @cached_property
    def shared_bytes(self) -> int:
        return self.tiles_offset + TILE_STAGES * TILE_BYTES

    # A multiprocessor has 512 registers for each of 128 threads. At launch, all warpgroups of a thread block have the
    # same number; the producer gives back what it does not need, and the consumers take it.

    @property
    def producer_registers(self) -> int:
        return 32 if self.config.n_consumers == 3 else 24

    @property
    def consumer_registers(self) -> int:
        return {1: 240, 2: 240, 3: 160}[self.config.n_consumers]

    # What a consumer thread holds of them: a warpgroup's 64 rows are spread over its 128 threads.

    @property
    def O_registers(self) -> int:
        return self.config.d_head * WARPGROUP_ROWS // WARPGROUP_THREADS

    @property
    def S_registers(self) -> int:
        return self.config.B_c * WARPGROUP_ROWS // WARPGROUP_THREADS

    @property
    def P_registers(self) -> int:
        """Two 16-bit numbers in each; S's own registers, unless the next S is computed at the same time."""
        return self.S_registers // 2 if self.config.overlaps_softmax else 0

    @property
    def operand_registers(self) -> int:
        return self.O_registers + self.S_registers + self.P_registers

    @property
    def halves_first_block(self) -> bool:
        """Whether a warpgroup whose rows attend to no key beyond the first half of a block computes that half alone.
        The compiler gives the scores of a half registers of their own; without them it serialises products."""
        half = self.half_block * WARPGROUP_ROWS // WARPGROUP_THREADS
        fits = self.operand_registers + half <= self.consumer_registers
        return self.config.overlaps_softmax and self.half_block < self.config.B_c and fits

    @property
    def spreads_chains(self) -> bool:
        """Whether the softmax interleaves independent chains of instructions, which takes registers. The scores need
        all of the 160 that three consumer warpgroups leave a thread."""
        return self.config.n_consumers < MAX_CONSUMERS

    @property
    def shares_dominance(self) -> bool:
        return shares_dominance(self.config.d_head)
