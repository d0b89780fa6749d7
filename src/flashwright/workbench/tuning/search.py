"""Successive halving: all candidates are measured a little, the faster half of them more, the last few often.

Everything measured goes through a journal. A search that is run again with the journal of an interrupted one takes
the same decisions from the same numbers, and measures only what is missing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flashwright.choice.results import Timing
from flashwright.kernels.family import KernelConfig
from flashwright.problem.reference import TOLERANCE
from flashwright.runtime.progress import progress_bar
from flashwright.workbench.tuning.journal import SearchJournal
from flashwright.workbench.tuning.measure import KernelCrash, Measurer

FINALISTS = 4
FINAL_SWEEPS = 9


@dataclass(frozen=True)
class Stage:
    """One step of the halving: the candidates left, fastest first."""

    sweeps: int
    timings: tuple[Timing, ...]


@dataclass(frozen=True)
class Wrong:
    """A kernel that does not compute attention."""

    config: KernelConfig
    error: float


def check_all(
    configs: Sequence[KernelConfig], measurer: Measurer, journal: SearchJournal, *, progress: bool = True
) -> tuple[list[KernelConfig], list[Wrong]]:
    """Those whose results agree with the float64 reference, and those whose do not."""
    right, wrong = [], []
    with progress_bar("checking", len(configs), enabled=progress) as advance:
        for config in configs:
            error = _checked_error(config, measurer, journal)
            if error < TOLERANCE[config.dtype]:
                right.append(config)
            else:
                wrong.append(Wrong(config, error))
            advance()
    return right, wrong


def _checked_error(config: KernelConfig, measurer: Measurer, journal: SearchJournal) -> float:
    if (known := journal.error(config)) is not None:
        return known
    try:
        error = measurer.error(config)
    except KernelCrash as crash:
        journal.record_error(config, float("inf"))
        raise KernelCrash(
            f"{crash}. It is noted as wrong: the same command with --resume goes on without it"
        ) from crash
    journal.record_error(config, error)
    recorded = journal.error(config)
    assert recorded is not None
    return recorded


def halve(
    configs: Sequence[KernelConfig],
    incumbents: Iterable[KernelConfig],
    measurer: Measurer,
    journal: SearchJournal,
    *,
    progress: bool = True,
) -> list[Stage]:
    """The stages from all configs to the last few, incumbents among them to the end. The last stage's first wins."""
    incumbents = [config for config in incumbents if config in configs]
    planned = schedule(len(configs))
    stages: list[Stage] = []
    with progress_bar("timing", sum(sweeps for _, sweeps in planned), enabled=progress) as advance:
        left = list(configs)
        for number, (count, sweeps) in enumerate(planned):
            left = _with_incumbents(left[:count], incumbents)
            timings = _measure(number, left, sweeps, measurer, journal, advance)
            stages.append(Stage(sweeps, timings))
            left = [timing.config for timing in timings]
    return stages


def schedule(count: int) -> list[tuple[int, int]]:
    """How many candidates are left in each stage, and how often each is measured there."""
    stages: list[tuple[int, int]] = []
    while count > FINALISTS:
        stages.append((count, len(stages) + 1))
        count = max(FINALISTS, -(-count // 2))
    return [*stages, (count, FINAL_SWEEPS)]


def _with_incumbents(left: list[KernelConfig], incumbents: Sequence[KernelConfig]) -> list[KernelConfig]:
    return [*left, *(config for config in incumbents if config not in left)]


def _measure(
    stage: int,
    configs: Sequence[KernelConfig],
    sweeps: int,
    measurer: Measurer,
    journal: SearchJournal,
    advance: Callable[[], None],
) -> tuple[Timing, ...]:
    """Medians over the sweeps, fastest first; of equals the one that was ahead before."""
    times: dict[KernelConfig, list[float]] = {config: [] for config in configs}
    for number in range(sweeps):
        measured = journal.sweep(stage, number, configs)
        if measured is None:
            measured = measurer.sweep(configs)
            journal.record_sweep(stage, number, measured)
        for config in configs:
            times[config].append(measured[config])
        advance()
    timings = [Timing(config, statistics.median(values)) for config, values in times.items()]
    return tuple(sorted(timings, key=lambda timing: timing.time_ms))
