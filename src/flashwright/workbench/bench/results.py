"""Results of a benchmark: measurements per cell, and the ratios and means that follow from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flashwright.problem.flops import FORWARD
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.peers import PEERS
from flashwright.workbench.bench.result_files import ResultFileError, parsed_entries, read_document, write_document
from flashwright.workbench.bench.scores import KINDS, NORMAL

OURS = "flashwright"
"""`attention()` with the family that it chooses."""
FORMAT = 2
READABLE_FORMATS = (1, FORMAT)
"""Format 1 has no kinds of scores, one implementation of ours, and a share of a matrix product's speed."""


def ours_of(family: str) -> str:
    """The name of `attention(family=…)` in results."""
    return f"{OURS} ({family})"


def is_ours(name: str) -> bool:
    return name == OURS or name.startswith(f"{OURS} (")


@dataclass(frozen=True)
class Measurement:
    """One implementation on one cell."""

    gpu_ms: float
    host_us: float
    relative_error: float
    """Against float64, on a sample of the rows."""
    kernel: str = ""
    """The kernel it ran, where the implementation reports it."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Measurement:
        names = ("gpu_ms", "host_us", "relative_error")
        numbers = {name: float(values[name]) for name in names}
        if not all(math.isfinite(number) and number >= 0 for number in numbers.values()) or not numbers["gpu_ms"]:
            raise ValueError(f"{numbers} are not all positive")
        return cls(**numbers, kernel=str(values.get("kernel", "")))


@dataclass(frozen=True)
class CellResult:
    cell: Cell
    measurements: Mapping[str, Measurement]
    failures: Mapping[str, str] = field(default_factory=dict)
    """Why an implementation has no measurement here."""

    def tflops(self, name: str) -> float | None:
        found = self.measurements.get(name)
        return None if found is None else self.cell.tflops(found.gpu_ms)

    def speed(self, name: str) -> float | None:
        """In the cell's unit."""
        found = self.measurements.get(name)
        return None if found is None else self.cell.speed(found.gpu_ms)

    def ratio(self, peer: str, ours: str = OURS) -> float | None:
        """How many times as fast as a peer one of ours is; None unless both were measured."""
        mine, theirs = self.measurements.get(ours), self.measurements.get(peer)
        return None if mine is None or theirs is None else theirs.gpu_ms / mine.gpu_ms

    def ratio_to_best_peer(self, ours: str) -> float | None:
        """How many times as fast as the fastest peer here; None if ours, or every peer, was not measured."""
        ratios = (self.ratio(name, ours) for name in self.measurements if not is_ours(name))
        return min((ratio for ratio in ratios if ratio is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        measured = {
            name: asdict(measurement) | {"tflops": self.cell.tflops(measurement.gpu_ms)}
            for name, measurement in self.measurements.items()
        }
        if self.cell.rows:
            for name, measurement in self.measurements.items():
                measured[name]["tbps"] = self.cell.speed(measurement.gpu_ms)
        peers = [name for name in measured if not is_ours(name)]
        return self.cell.to_dict() | {
            "implementations": measured,
            "ratios": {name: {peer: self.ratio(peer, name) for peer in peers} for name in measured if is_ours(name)},
            "failures": dict(self.failures),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CellResult:
        measurements = {str(name): Measurement.from_dict(m) for name, m in values["implementations"].items()}
        failures = {str(name): str(reason) for name, reason in values.get("failures", {}).items()}
        return cls(Cell.from_dict(values), measurements, failures)


@dataclass(frozen=True)
class Worst:
    """The smallest of some ratios, and the cell that has it."""

    ratio: float
    cell: Cell

    @classmethod
    def of(cls, ratios: Iterable[tuple[float | None, Cell]]) -> Worst | None:
        """None of no ratios."""
        known = [cls(ratio, cell) for ratio, cell in ratios if ratio is not None]
        return min(known, key=lambda worst: worst.ratio, default=None)

    def to_dict(self) -> dict[str, Any]:
        return {"ratio": self.ratio, "d_head": self.cell.d_head, "mask": self.cell.mask, "length": self.cell.length}


@dataclass(frozen=True)
class KindSummary:
    """One of ours on one kind of scores, over all problems."""

    scores: str
    name: str
    means: Mapping[str, float | None]
    """The geometric mean of the ratios to each peer."""
    worsts: Mapping[str, Worst | None]
    """The cell in which the ratio to each peer is least."""
    mean_to_best: float | None
    """The geometric mean of the ratios to the fastest peer of each cell."""
    worst_to_best: Worst | None
    worst_to_normal: Worst | None
    """How many times as fast as on normal scores, in the problem where that is least."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "scores": self.scores,
            "implementation": self.name,
            "means": dict(self.means),
            "worsts": {peer: None if worst is None else worst.to_dict() for peer, worst in self.worsts.items()},
            "mean_to_best_peer": self.mean_to_best,
            "worst_to_best_peer": None if self.worst_to_best is None else self.worst_to_best.to_dict(),
            "worst_to_normal": None if self.worst_to_normal is None else self.worst_to_normal.to_dict(),
        }


@dataclass(frozen=True)
class BenchResult:
    """A whole run, or what there is of it."""

    environment: Mapping[str, Any]
    arguments: Mapping[str, Any]
    cells: tuple[CellResult, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a peer was not measured at all."""
    complete: bool = True

    def implementations(self) -> list[str]:
        """Those with a measurement, ours first, then in the order of the peers."""
        measured = {name for result in self.cells for name in result.measurements}
        order = (*sorted(filter(is_ours, measured)), *PEERS, *sorted(measured))
        return [name for name in dict.fromkeys(order) if name in measured]

    @property
    def operation(self) -> str:
        """What was timed; all cells have the same."""
        return self.cells[0].cell.operation if self.cells else FORWARD

    def ours(self) -> list[str]:
        return [name for name in self.implementations() if is_ours(name)]

    def peers(self) -> list[str]:
        return [name for name in self.implementations() if not is_ours(name)]

    def kinds(self) -> list[str]:
        """The kinds of scores, in the order of their list."""
        found = {result.cell.scores for result in self.cells}
        return [kind for kind in dict.fromkeys((*KINDS, *sorted(found))) if kind in found]

    def of_kind(self, scores: str) -> BenchResult:
        return replace(self, cells=tuple(result for result in self.cells if result.cell.scores == scores))

    def panels(self) -> dict[tuple[int, bool], list[CellResult]]:
        """The cells of a result of one kind by (d_head, causal), each list by length."""
        panels: dict[tuple[int, bool], list[CellResult]] = {}
        for result in sorted(self.cells, key=lambda r: (r.cell.d_head, r.cell.causal, r.cell.length)):
            panels.setdefault((result.cell.d_head, result.cell.causal), []).append(result)
        return panels

    def summaries(self) -> list[KindSummary]:
        """Each of ours on each kind."""
        return [self._summary(name, kind) for name in self.ours() for kind in self.kinds()]

    def _summary(self, name: str, kind: str) -> KindSummary:
        cells = self.of_kind(kind).cells
        to_best = [(result.ratio_to_best_peer(name), result.cell) for result in cells]
        return KindSummary(
            kind,
            name,
            {peer: mean_ratio(cells, peer, name) for peer in self.peers()},
            {peer: Worst.of((each.ratio(peer, name), each.cell) for each in cells) for peer in self.peers()},
            geometric_mean(ratio for ratio, _ in to_best if ratio is not None),
            Worst.of(to_best),
            Worst.of(self._ratios_to_normal(name, cells)),
        )

    def _ratios_to_normal(self, name: str, cells: Iterable[CellResult]) -> Iterator[tuple[float | None, Cell]]:
        normal = {result.cell: result for result in self.of_kind(NORMAL).cells}
        for result in cells:
            usual = normal.get(result.cell.problem)
            if usual is not None and name in usual.measurements and name in result.measurements:
                yield usual.measurements[name].gpu_ms / result.measurements[name].gpu_ms, result.cell

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "complete": self.complete,
            "operation": self.operation,
            "environment": dict(self.environment),
            "arguments": dict(self.arguments),
            "summary": [summary.to_dict() for summary in self.summaries()],
            "missing": dict(self.missing),
            "cells": [result.to_dict() for result in self.cells],
        }


SAME_IN_PARTS = ("gpu", "driver", "torch", "cudnn", "nvrtc", "flashwright")
"""What the parts of one grid agree on."""


def combined(parts: Sequence[BenchResult]) -> BenchResult:
    """The result whose parts were measured apart, a head dimension each, for example; raises if they do not fit."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for name in SAME_IN_PARTS:
        values = list(dict.fromkeys(str(part.environment.get(name)) for part in parts))
        if len(values) > 1:
            raise ValueError(
                f"results of different machines or versions do not make one: {name} is {', '.join(values)}"
            )
    cells = [result for part in parts for result in part.cells]
    for cell, count in Counter(result.cell for result in cells).items():
        if count > 1:
            rows = str(cell) if cell.rows else f"d_head {cell.d_head}, {cell.mask}, {cell.length} rows"
            where = f"{cell.dtype.name}, {rows}, {cell.scores}"
            raise ValueError(f"{where} is in {count} results, which therefore do not make one")
    operations = list(dict.fromkeys(result.cell.operation for result in cells))
    if len(operations) > 1:
        raise ValueError(f"results of different operations do not make one: {', '.join(operations)}")
    arguments = {n: v for n, v in first.arguments.items() if all(part.arguments.get(n) == v for part in parts)}
    missing = {name: why for part in parts for name, why in part.missing.items()}
    return BenchResult(
        first.environment, arguments, tuple(cells), missing, complete=all(part.complete for part in parts)
    )


def label_of(name: str) -> str:
    return PEERS[name].label if name in PEERS else name


def short_label_of(name: str) -> str:
    return (PEERS[name].short if name in PEERS else "") or name


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def mean_ratio(cells: Iterable[CellResult], peer: str, ours: str = OURS) -> float | None:
    """The geometric mean of the ratios to a peer, over the cells where both were measured."""
    return geometric_mean(ratio for result in cells if (ratio := result.ratio(peer, ours)) is not None)


def write_result(path: Path, result: BenchResult) -> None:
    write_document(path, result.to_dict())


def read_result(path: Path) -> BenchResult:
    """A stored result of any format; shares of a peak, which format 1 has, are left out."""
    document = read_document(path, holding="cells", made_by="flashwright bench")
    if document.get("format") not in READABLE_FORMATS:
        allowed = ", ".join(map(str, READABLE_FORMATS))
        raise ResultFileError(f"{path}: format {document.get('format')!r} is not known; allowed: {allowed}")
    cells = parsed_entries(path, document, "cells", CellResult.from_dict)
    return BenchResult(
        environment=document.get("environment", {}),
        arguments=document.get("arguments", {}),
        cells=tuple(cells),
        missing=document.get("missing", {}),
        complete=bool(document.get("complete", False)),
    )
