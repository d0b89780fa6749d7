"""Who can touch the shared memory of a block: its warps, and what they start that runs on without them.

Each party has a column in the vector clocks of `hazards`:

    warps | wgmma of each warpgroup | bulk stores of each warp | proxy fences of each warp | mbarriers …

A warp has *seen* a party up to some stamp: everything of smaller stamps is ordered before what the warp does
next. Stamps of a warp advance when it synchronises; of wgmma and bulk stores they are numbers of commit groups,
of an mbarrier phases: bulk copies write on behalf of the phase they complete. A fence column is no party of its
own: it says which of a warp's stamps lie before a proxy fence, by itself or by a warp that had seen them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WARPS_PER_WARPGROUP = 4
_MBARRIERS = 32  # columns made at first; more are added when a kernel initialises more


@dataclass(frozen=True)
class Parties:
    """Column numbers for a block of ``warps`` warps; without asynchronous parties only warps have columns."""

    warps: int
    is_asynchronous: bool

    @property
    def warpgroups(self) -> int:
        return -(-self.warps // WARPS_PER_WARPGROUP)

    @property
    def readers(self) -> int:
        """Columns of parties that can read shared memory."""
        return self.warps + (self.warpgroups + self.warps if self.is_asynchronous else 0)

    @property
    def columns(self) -> int:
        return self.readers + (self.warps + _MBARRIERS if self.is_asynchronous else 0)

    @property
    def fences(self) -> int:
        """Column of the first warp's proxy fence."""
        return self.readers

    def wgmma(self, warpgroup: Any) -> Any:
        """For one warpgroup of the block, or an array of them."""
        return self.warps + warpgroup

    def bulk_store(self, warp: int) -> int:
        return self.warps + self.warpgroups + warp

    def mbarrier(self, index: int) -> int:
        return self.readers + self.warps + index

    def access_of(self, column: int) -> str:
        """What an asynchronous party does to shared memory."""
        if column < self.warps + self.warpgroups:
            return "wgmma read"
        return "bulk store" if column < self.readers else "bulk copy"

    def warp_behind(self, column: int) -> int | None:
        """The warp (the first of a warpgroup) that started an asynchronous party; None: any may have."""
        if column < self.warps + self.warpgroups:
            return (column - self.warps) * WARPS_PER_WARPGROUP
        return column - self.warps - self.warpgroups if column < self.readers else None
