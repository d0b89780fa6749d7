"""Measuring implementations beside each other, cell by cell. Failures are listed with their reasons."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.results import CellResult, Measurement

Prepare = Callable[[Inputs], Prepared]

WRONG_ABOVE = 0.05
"""A relative error that no rounding to 16 bits explains: such an output is not attention, and is not timed."""
LONGEST_REASON = 300


class Machine(Protocol):
    """The operations that measuring needs of a machine."""

    def inputs(self, cell: Cell) -> Inputs:
        """Random tensors, the same for every implementation."""

    def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        """Of one call's output, against float64."""

    def gpu_times_ms(self, prepared: Mapping[str, Prepared]) -> tuple[dict[str, float], dict[str, str]]:
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
    """The cells' results, and whether they are complete: an interruption loses only the cell under way."""
    results: list[CellResult] = []
    try:
        for cell in cells:
            results.append(measure_cell(machine, cell, implementations))
            advance()
    except KeyboardInterrupt:
        return results, False
    return results, True


def measure_cell(machine: Machine, cell: Cell, implementations: Mapping[str, Prepare]) -> CellResult:
    try:
        inputs = machine.inputs(cell)
    except Exception as problem:  # too large for the GPU's memory, for one
        return CellResult(cell, {}, dict.fromkeys(implementations, reason(problem)))
    ready: dict[str, Prepared] = {}
    errors: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, prepare in implementations.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                prepared = prepare(inputs)
                error = machine.relative_error(prepared, inputs)
            except Exception as problem:  # other people's code may raise anything; the grid goes on
                failures[name] = reason(problem, [str(warning.message) for warning in caught])
                continue
        if math.isfinite(error) and error <= WRONG_ABOVE:
            ready[name], errors[name] = prepared, error
        else:
            failures[name] = f"wrong output: relative error {error:.2g} against float64"
    try:
        times, untimed = machine.gpu_times_ms(ready)
        measurements = {
            name: Measurement(gpu_ms, machine.host_us(ready[name], gpu_ms), errors[name], ready[name].kernel)
            for name, gpu_ms in times.items()
        }
    except Exception as problem:  # whoever broke the GPU, no time of this cell can be trusted
        return CellResult(cell, {}, failures | dict.fromkeys(ready, reason(problem)))
    return CellResult(cell, measurements, failures | untimed)


def reason(error: BaseException, said: Sequence[str] = ()) -> str:
    """One line: the error's first line, and the warnings in which PyTorch explains it."""
    first_line = next(iter(str(error).strip().splitlines()), "") or "no message"
    texts = [f"{type(error).__name__}: {first_line}"]
    texts += dict.fromkeys(re.sub(r"\s*\(Triggered internally.*", "", text, flags=re.DOTALL).strip() for text in said)
    text = "; ".join(texts)
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
