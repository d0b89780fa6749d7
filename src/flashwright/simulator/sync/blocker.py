"""What the wave needs to know of an object that threads can wait in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ..errors import ErrorKind


class Blocker(Protocol):
    @property
    def deadlock_kind(self) -> ErrorKind:
        """How to call it when threads wait here and none can run any more."""
        ...

    def on_exit(self) -> None:
        """Threads have exited: release those that waited for them."""
        ...

    def waiting_threads(self) -> Iterator[tuple[int, np.ndarray, str]]:
        """(program counter, mask of threads, what they wait for) of all that wait here."""
        ...
