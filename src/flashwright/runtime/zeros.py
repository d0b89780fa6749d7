"""Words in a GPU's memory by which the thread blocks of a launch tell each other how far they are. A launch finds and
leaves them at zero.

Launches of one stream follow one another and share theirs. Captured launches of one stream share those of their
capture, which are kept for as long as the process lives: graphs may be replayed side by side, and in any order, but
none overlaps with itself.
"""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

from flashwright.runtime.devices import driver_checked

if TYPE_CHECKING:
    import torch


class Zeros:
    """Those of one GPU."""

    RESERVE = 1 << 16
    """Words that are set aside for launches to be captured: they cannot be cleared while a capture is under way."""
    GRAPHS = 4
    """For so many graphs there is always enough."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._of_streams: dict[int, torch.Tensor] = {}
        self._of_captures: dict[tuple[int, int], torch.Tensor] = {}
        self._reserve: torch.Tensor | None = None
        self._lock = Lock()

    def take(self, count: int, stream: int) -> torch.Tensor:
        """So many words of 4 bytes, for one launch on a stream."""
        if self._torch.cuda.is_current_stream_capturing():
            return self._for_capture(count, stream)
        known = self._of_streams.get(stream)
        if known is None or len(known) < count:
            known = self._of_streams[stream] = self._new(count)
        if self._reserve is None or len(self._reserve) < count:
            self._set_aside(count)
        return known

    def _for_capture(self, count: int, stream: int) -> torch.Tensor:
        capture = (_capture_number(stream), stream)
        with self._lock:
            known = self._of_captures.get(capture)
            if known is not None and len(known) >= count:
                return known
            reserve = self._reserve
            if reserve is not None and len(reserve) >= count:
                self._reserve = reserve[count:]
                self._of_captures[capture] = reserve[:count]
                return reserve[:count]
        return self._new(count)  # captured too, and cleared at every replay

    def _set_aside(self, count: int) -> None:
        reserve = self._new(max(self.RESERVE, self.GRAPHS * count))
        reserve[-1].item()  # waits until they are zero: a replay may be on any stream
        with self._lock:
            self._reserve = reserve

    def _new(self, count: int) -> torch.Tensor:
        return self._torch.zeros(count, dtype=self._torch.int32, device=self._device)


def _capture_number(stream: int) -> int:
    """Of the capture that is under way on a stream: no other has the same in this process."""
    from cuda.bindings import driver

    status, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    driver_checked((status,))
    return int(number)


@cache
def zeros_of(device: torch.device) -> Zeros:
    return Zeros(device)
