"""Counters by which the thread blocks of a launch find out who arrives last. A launch finds and leaves them at zero.

Launches of one stream follow one another and share theirs. A captured launch keeps its own for as long as the process
lives: graphs may be replayed side by side, and in any order, but none overlaps with itself.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class ArrivalCounters:
    """Those of one GPU."""

    RESERVE = 1 << 16
    """Counters that are set aside for launches to be captured: they cannot be cleared while a capture is under way."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._of_streams: dict[int, torch.Tensor] = {}
        self._reserve: torch.Tensor | None = None
        self._captured: list[torch.Tensor] = []
        self._lock = Lock()

    def take(self, count: int, stream: int) -> torch.Tensor:
        """So many counters, for one launch on a stream."""
        if self._torch.cuda.is_current_stream_capturing():
            return self._for_capture(count)
        known = self._of_streams.get(stream)
        if known is None or len(known) < count:
            known = self._of_streams[stream] = self._zeros(count)
        if self._reserve is None or len(self._reserve) < count:
            self._set_aside(count)
        return known

    def _for_capture(self, count: int) -> torch.Tensor:
        with self._lock:
            reserve = self._reserve
            if reserve is not None and len(reserve) >= count:
                self._reserve = reserve[count:]
                self._captured.append(reserve[:count])
                return reserve[:count]
        return self._zeros(count)  # captured too, and cleared at every replay

    def _set_aside(self, count: int) -> None:
        reserve = self._zeros(max(self.RESERVE, 4 * count))
        reserve[-1].item()  # waits until they are zero: a replay may be on any stream
        with self._lock:
            self._reserve = reserve

    def _zeros(self, count: int) -> torch.Tensor:
        return self._torch.zeros(count, dtype=self._torch.int32, device=self._device)


@cache
def arrival_counters(device: torch.device) -> ArrivalCounters:
    return ArrivalCounters(device)
