"""Measuring implementations beside each other, problem by problem. Failures are listed with their reasons."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.results import CellResult, Measurement

Prepare = Callable[[Inputs], Prepared]

WRONG_ABOVE = 0.05
"""A relative error that no rounding to 16 bits explains: such an output is not attention, and is not timed."""
LONGEST_REASON = 300


class Timed(NamedTuple):
    """What is timed: an implementation on scores of a kind."""

    scores: str
    name: str


class Machine(Protocol):
    """The operations that measuring needs of a machine."""

    def inputs(self, cell: Cell) -> Inputs:
        """Random tensors with scores of the cell's kind, the same for every implementation."""

    def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        """Of one call's output, against float64."""

    def gpu_times_ms(self, prepared: Mapping[Timed, Prepared]) -> tuple[dict[Timed, float], dict[Timed, str]]:
        """GPU time of one call of each, measured in turns; and why some could not be timed."""

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        """Host time of one asynchronous call, which takes the GPU `gpu_ms`."""


def measure(
    machine: Machine,
    cells: Sequence[Cell],
    implementations: Mapping[str, Prepare],
    *,
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[CellResult], bool]:
    """The cells' results, and whether they are complete: an interruption loses only the problem under way."""
    problems: dict[Cell, list[Cell]] = {}
    for cell in cells:
        problems.setdefault(cell.problem, []).append(cell)
    results: list[CellResult] = []
    try:
        for kinds in problems.values():
            results += measure_kinds(machine, kinds, implementations)
            for _ in kinds:
                advance()
    except KeyboardInterrupt:
        return results, False
    return results, True


def measure_cell(machine: Machine, cell: Cell, implementations: Mapping[str, Prepare]) -> CellResult:
    (result,) = measure_kinds(machine, [cell], implementations)
    return result


def measure_kinds(machine: Machine, cells: Sequence[Cell], implementations: Mapping[str, Prepare]) -> list[CellResult]:
    """One problem with scores of several kinds. All implementations on all kinds are timed in turns, so that kinds can
    be compared as implementations can. Host time does not depend on values, and is measured once an implementation."""
    ready: dict[Timed, Prepared] = {}
    errors: dict[Timed, float] = {}
    failures: dict[Timed, str] = {}
    for cell in cells:
        _prepare(machine, cell, implementations, ready, errors, failures)
    measurements: dict[Timed, Measurement] = {}
    try:
        times, untimed = machine.gpu_times_ms(ready)
        failures |= untimed
        host_us: dict[str, float] = {}
        for timed, gpu_ms in times.items():
            if timed.name not in host_us:
                host_us[timed.name] = machine.host_us(ready[timed], gpu_ms)
            measurements[timed] = Measurement(gpu_ms, host_us[timed.name], errors[timed], ready[timed].kernel)
    except Exception as problem:  # whoever broke the GPU, no time of this problem can be trusted
        measurements = {}
        failures |= dict.fromkeys(ready, reason(problem))
    return [
        CellResult(
            cell,
            {name: found for (kind, name), found in measurements.items() if kind == cell.scores},
            {name: why for (kind, name), why in failures.items() if kind == cell.scores},
        )
        for cell in cells
    ]


def _prepare(
    machine: Machine,
    cell: Cell,
    implementations: Mapping[str, Prepare],
    ready: dict[Timed, Prepared],
    errors: dict[Timed, float],
    failures: dict[Timed, str],
) -> None:
    """Makes every implementation ready on a cell's inputs and checks its output; one that fails is listed."""
    try:
        inputs = machine.inputs(cell)
    except Exception as problem:  # too large for the GPU's memory, for one
        failures |= {Timed(cell.scores, name): reason(problem) for name in implementations}
        return
    for name, prepare in implementations.items():
        timed = Timed(cell.scores, name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                prepared = prepare(inputs)
                error = machine.relative_error(prepared, inputs)
            except Exception as problem:  # other people's code may raise anything; the grid goes on
                failures[timed] = reason(problem, [str(warning.message) for warning in caught])
                continue
        if math.isfinite(error) and error <= WRONG_ABOVE:
            ready[timed], errors[timed] = prepared, error
        else:
            failures[timed] = f"wrong output: relative error {error:.2g} against float64"


def reason(error: BaseException, said: Sequence[str] = ()) -> str:
    """One line: the error's first line, and the warnings in which PyTorch explains it."""
    first_line = next(iter(str(error).strip().splitlines()), "") or "no message"
    texts = [f"{type(error).__name__}: {first_line}"]
    texts += dict.fromkeys(re.sub(r"\s*\(Triggered internally.*", "", text, flags=re.DOTALL).strip() for text in said)
    text = "; ".join(texts)
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
