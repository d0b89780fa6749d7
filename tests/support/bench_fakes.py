"""Benchmarks that were never run: cells with written-down times, and a machine whose every time is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashwright import DType
from flashwright.workbench.bench.grid import Cell, cell_of, grid
from flashwright.workbench.bench.measure import Timed
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.results import OURS, BenchResult, CellResult, Measurement, is_ours


def a_cell(length: int = 512, **changes: object) -> Cell:
    return replace(cell_of(DType.BF16, 64, False, length), **changes)


def found(cell: Cell, **times_ms: float) -> CellResult:
    names = {"ours": OURS, "fa2": "sdpa-fa2", "cudnn": "sdpa-cudnn"}
    return CellResult(cell, {names[name]: Measurement(ms, 20.0, 1e-3) for name, ms in times_ms.items()})


def a_result() -> BenchResult:
    """Two head dimensions, two masks, three lengths; one peer fails on the longest."""
    cells = []
    for cell in grid(DType.BF16, (64, 128), (False, True), (512, 1024, 16_384)):
        ours = cell.flops / 400e9
        one = found(cell, ours=ours, fa2=1.25 * ours, cudnn=0.5 * ours)
        if cell.length == 16_384:
            measurements = {name: m for name, m in one.measurements.items() if name != "sdpa-cudnn"}
            one = CellResult(cell, measurements, {"sdpa-cudnn": "RuntimeError: no [such] kernel"})
        cells.append(one)
    environment = {"gpu": "NVIDIA Imaginary", "torch": "2.11", "date": "2026-01-02T03:04:05+00:00"}
    return BenchResult(environment, {"dtype": "BF16"}, tuple(cells), {"fa3": "No module named 'fa3'"})


class FakeMachine:
    """Times and errors that are written down, and no GPU. Each prepared call is a function that returns its name."""

    times_ms: Mapping[str, float] = {OURS: 2.0, "sdpa-fa2": 3.0, "sdpa-cudnn": 1.0}
    slower: Mapping[str, float] = {}
    """How many times as long ours takes on a kind of scores."""
    errors: Mapping[str, float] = {}
    uncapturable: tuple[str, ...] = ()

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.interrupted_at = interrupted_at
        self.cells: list[Cell] = []
        self.timed_together: list[list[Timed]] = []
        self.host_timed: list[str] = []

    def inputs(self, cell: Cell) -> Inputs:
        if len(self.cells) == self.interrupted_at:
            raise KeyboardInterrupt
        self.cells.append(cell)
        return Inputs("q", "k", "v", cell.causal)

    def relative_error(self, prepared: Prepared, inputs: Inputs) -> float:
        return self.errors.get(prepared.output(), 1e-3)

    def gpu_times_ms(self, prepared: Mapping[Timed, Prepared]) -> tuple[dict[Timed, float], dict[Timed, str]]:
        self.timed_together.append(list(prepared))
        times = {each: self._time_ms(each) for each in prepared if each.name not in self.uncapturable}
        return times, {each: "cannot be captured" for each in prepared if each.name in self.uncapturable}

    def _time_ms(self, timed: Timed) -> float:
        return self.times_ms[timed.name] * (self.slower.get(timed.scores, 1) if is_ours(timed.name) else 1)

    def host_us(self, prepared: Prepared, gpu_ms: float) -> float:
        self.host_timed.append(prepared.output())
        return 10 * gpu_ms


def returning(name: str) -> object:
    return lambda inputs: Prepared(lambda: name, kernel=f"the kernel of {name}")


def raising(error: BaseException) -> object:
    def prepare(inputs: Inputs) -> Prepared:
        raise error

    return prepare


THREE = {name: returning(name) for name in (OURS, "sdpa-fa2", "sdpa-cudnn")}
