"""The thread blocks of a launch, wave after wave.

A wave whose threads wait for blocks that have not started (a barrier of the whole grid, a scan that looks back) is set
aside while the next one runs, and goes on when others have done something.
"""

from __future__ import annotations

from collections.abc import Callable

from .architecture import WARP_SIZE
from .errors import SimulationError
from .trace import WarpTrace
from .wave import Launch, Wave

# More threads than any GPU holds at once: blocks that wait for each other beyond that would wait there, too.
_MAX_RESIDENT_THREADS = 256 * 2048


def run_blocks(
    launch: Launch,
    blocks: int,
    per_wave: int,
    trace_warp: tuple[int, int] | None,
    progress: Callable[[int, int], None] | None = None,
) -> WarpTrace | None:
    """Execute all blocks, ``per_wave`` of them together; the trace of warp ``trace_warp`` (block, warp).

    ``progress`` is called with the blocks started before a wave, and with all blocks.
    """
    waiting: list[Wave] = []
    traces = []
    for first in range(0, blocks, per_wave):
        if progress is not None:
            progress(first, blocks)
        count = min(per_wave, blocks - first)
        traced = None
        if trace_warp is not None and first <= trace_warp[0] < first + count:
            traced = (trace_warp[0] - first) * launch.warps_per_block + trace_warp[1]
        wave = Wave(launch, first, count, traced)
        if wave.trace is not None:
            traces.append(wave.trace)
        if not wave.run(gives_way=_threads(waiting) < _MAX_RESIDENT_THREADS):
            waiting.append(wave)
            _check_residency([wave for wave in waiting if wave.spinning.has_parked])
    while waiting:
        before = launch.activity.count
        waiting = [wave for wave in waiting if not wave.run()]
        if waiting and launch.activity.count == before:
            waiting[0].report_deadlock()
    return traces[0] if traces else None


def _check_residency(waiting: list[Wave]) -> None:
    if _threads(waiting) > _MAX_RESIDENT_THREADS:
        blocks = sum(wave.blocks for wave in waiting)
        raise SimulationError(
            "deadlock",
            f"{blocks} thread blocks of {waiting[0].warps_per_block * WARP_SIZE} threads wait for others that have not "
            "started; no GPU holds that many at once",
            kernel=waiting[0].program.name,
        )


def _threads(waves: list[Wave]) -> int:
    return sum(wave.threads for wave in waves)
