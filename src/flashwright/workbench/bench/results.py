"""Results of a benchmark: measurements per cell, and the ratios and means that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.peers import PEERS
from flashwright.workbench.bench.result_files import parsed_entries, read_document, write_document

OURS = "flashwright"
FORMAT = 1


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

    def ratio(self, peer: str) -> float | None:
        """How many times as fast as a peer ours is; None unless both were measured."""
        ours, theirs = self.measurements.get(OURS), self.measurements.get(peer)
        return None if ours is None or theirs is None else theirs.gpu_ms / ours.gpu_ms

    def to_dict(self, peak_tflops: float | None) -> dict[str, Any]:
        measured = {}
        for name, measurement in self.measurements.items():
            tflops = self.cell.tflops(measurement.gpu_ms)
            percent = 100 * tflops / peak_tflops if peak_tflops else None
            measured[name] = asdict(measurement) | {"tflops": tflops, "percent_of_peak": percent}
        ratios = {name: self.ratio(name) for name in self.measurements if name != OURS}
        return self.cell.to_dict() | {
            "implementations": measured,
            "ratios": {name: ratio for name, ratio in ratios.items() if ratio is not None},
            "failures": dict(self.failures),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CellResult:
        measurements = {str(name): Measurement.from_dict(m) for name, m in values["implementations"].items()}
        failures = {str(name): str(reason) for name, reason in values.get("failures", {}).items()}
        return cls(Cell.from_dict(values), measurements, failures)


@dataclass(frozen=True)
class BenchResult:
    """A whole run, or what there is of it."""

    environment: Mapping[str, Any]
    arguments: Mapping[str, Any]
    peak_tflops: float | None
    """Of a large matrix product in the same dtype, measured in the same run."""
    cells: tuple[CellResult, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why a peer was not measured at all."""
    complete: bool = True

    def implementations(self) -> list[str]:
        """Those with a measurement, ours first, then in the order of the peers."""
        measured = {name for result in self.cells for name in result.measurements}
        order = (OURS, *PEERS, *sorted(measured))
        return [name for name in dict.fromkeys(order) if name in measured]

    def peers(self) -> list[str]:
        return [name for name in self.implementations() if name != OURS]

    def panels(self) -> dict[tuple[int, bool], list[CellResult]]:
        """The cells by (d_head, causal), each list by length."""
        panels: dict[tuple[int, bool], list[CellResult]] = {}
        for result in sorted(self.cells, key=lambda r: (r.cell.d_head, r.cell.causal, r.cell.length)):
            panels.setdefault((result.cell.d_head, result.cell.causal), []).append(result)
        return panels

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "complete": self.complete,
            "environment": dict(self.environment),
            "arguments": dict(self.arguments),
            "peak_tflops": self.peak_tflops,
            "geometric_means": {peer: mean_ratio(self.cells, peer) for peer in self.peers()},
            "missing": dict(self.missing),
            "cells": [result.to_dict(self.peak_tflops) for result in self.cells],
        }


def label_of(name: str) -> str:
    return PEERS[name].label if name in PEERS else name


def short_label_of(name: str) -> str:
    return (PEERS[name].short if name in PEERS else "") or name


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def mean_ratio(cells: Iterable[CellResult], peer: str) -> float | None:
    """The geometric mean of the ratios to a peer, over the cells where both were measured."""
    return geometric_mean(ratio for result in cells if (ratio := result.ratio(peer)) is not None)


def write_result(path: Path, result: BenchResult) -> None:
    write_document(path, result.to_dict())


def read_result(path: Path) -> BenchResult:
    document = read_document(path, holding="cells", made_by="flashwright bench")
    if document.get("format") != FORMAT:
        raise ValueError(f"{path}: format {document.get('format')!r} is not known; allowed: {FORMAT}")
    cells = parsed_entries(path, document, "cells", CellResult.from_dict)
    peak = document.get("peak_tflops")
    return BenchResult(
        environment=document.get("environment", {}),
        arguments=document.get("arguments", {}),
        peak_tflops=None if peak is None else float(peak),
        cells=tuple(cells),
        missing=document.get("missing", {}),
        complete=bool(document.get("complete", False)),
    )
