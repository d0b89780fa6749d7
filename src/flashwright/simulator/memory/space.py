"""What every state space offers to load and store instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from ..wave import Wave


class MemorySpace(Protocol):
    def locate(
        self, wave: Wave, addresses: np.ndarray, width: int, access: str, data: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Check and count a ``load``, ``store`` or ``atomic`` of ``width`` bytes of each active thread.

        Returns a view of the memory as items of that width, and the index of each thread's item in it.
        ``data`` is what a store will write.
        """
        ...
