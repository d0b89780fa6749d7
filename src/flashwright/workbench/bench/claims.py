"""What the documents claim about speed, as pairs of kernels to time, and what the times say about it.

A claim says that a knob pays under some conditions, and brings little or costs time under others. For each condition
there is a pair of kernels that differ in that knob. All kernels of a problem are timed in turns, in random order; the
first of each problem is timed twice, as two candidates: their difference is the spread of the measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.names import parse_kernel_name_into_config
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes
from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.grid import Cell, cell_of
from flashwright.workbench.bench.knob_effects import AGAIN
from flashwright.workbench.bench.measure import Machine, Prepare, measure_cell
from flashwright.workbench.bench.peers import Inputs, Prepared
from flashwright.workbench.bench.result_files import parsed_entries, read_document, write_document
from flashwright.workbench.bench.results import CellResult

LENGTH = 4096
"""Rows, where a claim is not about lengths."""
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)
SHORT_UP_TO, LONG_FROM = 256, 1024
"""The documents give no numbers; these are ours."""
D_HEADS = (64, 128, 256)
B_CS = (32, 64, 128)
LOAD_TILES = (2, 4)
LEAST_DIFFERENCE = 0.01
"""Times closer than this are taken as equal, however small the spread."""
LITTLE_GAIN = 0.05
"""How much faster a kernel may be where the documents expect little; they give no number, and this is ours."""


class Expected(Enum):
    """What the documents say of the second kernel of a pair, against the first."""

    FASTER = "faster"
    NO_GAIN = "little gain, or a loss"
    NOTHING = "–"


class Outcome(Enum):
    FASTER = "faster"
    EQUAL = "no difference"
    SLOWER = "slower"


@dataclass(frozen=True)
class Pair:
    """Two kernels of one problem, the second with the claim's knob turned."""

    condition: str
    cell: Cell
    first: FlashForwardKernelConfig
    second: FlashForwardKernelConfig
    expected: Expected

    @property
    def change(self) -> str:
        """The knob that is turned, and how: `K_mma_load_K_tiles: 0 → 2`."""
        names = (field.name for field in fields(self.first))
        (turned,) = (name for name in names if getattr(self.first, name) != getattr(self.second, name))
        old, new = (_value(getattr(config, turned)) for config in (self.first, self.second))
        return f"{turned}: {old} → {new}"


def _value(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Claim:
    title: str
    statement: str
    pairs: tuple[Pair, ...]


# --- The claims ------------------------------------------------------------------------------------------------


def claims() -> tuple[Claim, ...]:
    return (
        Claim(
            "Eager loading by length",
            "`eager_load_blocks` pays on medium and long sequences; on short ones it brings little, and may cost more "
            "than it saves.",
            tuple(_eager()),
        ),
        Claim(
            "Double buffering by arithmetic intensity",
            "`mma_double_buffer_loads` pays at high arithmetic intensity (large `d_head`, moderate `B_c`); at low "
            "intensity (small `d_head`, small `B_c`) it brings little, and may cost time through registers.",
            tuple(_buffering(keep_order=False)),
        ),
        Claim(
            "Double buffering when the order holds",
            "The same with `keep_order`: loads run one tile ahead in machine code too.",
            tuple(_buffering(keep_order=True)),
        ),
        Claim(
            "K load tiles against the whole block",
            "`K_mma_load_K_tiles` is best between 2 and 4, which balances bandwidth against registers.",
            tuple(_load_tiles(keep_order=False)),
        ),
        Claim(
            "K load tiles when the order holds",
            "The same with `keep_order`.",
            tuple(_load_tiles(keep_order=True)),
        ),
        Claim(
            "The price of keeping the order",
            "The documents do not speak of it: their order is the source's. Each pair is a kernel without and with "
            "`keep_order`.",
            tuple(_order()),
        ),
    )


def _config(short_form: str) -> FlashForwardKernelConfig:
    return parse_kernel_name_into_config(short_form)


def _eager() -> Iterator[Pair]:
    eager = _config("(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
    for length in LENGTHS:
        expected = Expected.NOTHING
        if length <= SHORT_UP_TO:
            expected = Expected.NO_GAIN
        elif length >= LONG_FROM:
            expected = Expected.FASTER
        cell = cell_of(eager.dtype, eager.d_head, False, length)
        yield Pair(f"{length:,} rows", cell, replace(eager, eager_load_blocks=False), eager, expected)


def _buffering(*, keep_order: bool) -> Iterator[Pair]:
    for dtype, d_head, B_c, softmax in product(DType, D_HEADS, B_CS, (True, False)):
        off = FlashForwardKernelConfig(
            dtype, d_head, 64, B_c, 4, True, True, True, 2, 2, 2, False, softmax, keep_order=keep_order
        )
        intense = d_head >= 128 and B_c >= 64
        condition = f"{dtype.name}, d_head {d_head}, B_c {B_c}, {'optimised' if softmax else 'plain'} softmax"
        expected = Expected.FASTER if intense else Expected.NO_GAIN
        yield Pair(condition, _cell(off), off, replace(off, mma_double_buffer_loads=True), expected)


def _load_tiles(*, keep_order: bool) -> Iterator[Pair]:
    for d_head, buffer, tiles in product((64, 128), (False, True), LOAD_TILES):
        whole = FlashForwardKernelConfig(
            DType.BF16, d_head, 64, 64, 4, True, True, True, 0, 0, 2, buffer, True, keep_order=keep_order
        )
        condition = (
            f"d_head {d_head}, {tiles} fragments against all {d_head // 8}{', double-buffered' if buffer else ''}"
        )
        yield Pair(condition, _cell(whole), whole, replace(whole, K_mma_load_K_tiles=tiles), Expected.FASTER)


def _order() -> Iterator[Pair]:
    early = _config("(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
    variations: tuple[dict[str, Any], ...] = (
        {},
        {"mma_double_buffer_loads": True},
        {"K_mma_load_K_tiles": 0},
        {"K_mma_load_K_tiles": 4},
        {"assembler_reorders": True},
    )
    for changes in variations:
        free = replace(early, **changes)
        yield Pair(f"`{free}`", _cell(free), free, replace(free, keep_order=True), Expected.NOTHING)


def _cell(config: FlashForwardKernelConfig) -> Cell:
    return cell_of(config.dtype, config.d_head, False, LENGTH)


def configs_by_cell(every: Sequence[Claim]) -> dict[Cell, list[FlashForwardKernelConfig]]:
    """What is timed of each problem, each kernel once."""
    found: dict[Cell, dict[FlashForwardKernelConfig, None]] = {}
    for claim in every:
        for pair in claim.pairs:
            found.setdefault(pair.cell, {}).update(dict.fromkeys((pair.first, pair.second)))
    return {cell: list(configs) for cell, configs in found.items()}


def check_buildable(every: Sequence[Claim]) -> None:
    """Raises `ValueError` for a config that no kernel can be built from."""
    for configs in configs_by_cell(every).values():
        for config in configs:
            ForwardKernelTileShapes(config)


# --- Measuring -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClaimResults:
    environment: Mapping[str, Any]
    cells: tuple[CellResult, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "environment": dict(self.environment),
            "cells": [cell.to_dict() for cell in self.cells],
        }


def measure_claims(
    machine: Machine,
    every: Sequence[Claim],
    prepare: Callable[[FlashForwardKernelConfig, Inputs], Prepared],
    *,
    advance: Callable[[], None] = lambda: None,
) -> tuple[CellResult, ...]:
    """Times of every kernel of every problem. A kernel that fails is recorded with its reason."""
    cells = []
    for cell, configs in configs_by_cell(every).items():
        candidates: dict[str, Prepare] = {config.short_form(): partial(prepare, config) for config in configs}
        candidates[configs[0].short_form() + AGAIN] = partial(prepare, configs[0])
        cells.append(measure_cell(machine, cell, candidates))
        advance()
    return tuple(cells)


def write_claims(path: Path, results: ClaimResults) -> None:
    write_document(path, results.to_dict())


def read_claims(path: Path) -> ClaimResults:
    document = read_document(path, holding="cells", made_by="benchmarks/claims.py")
    return ClaimResults(
        document.get("environment", {}), tuple(parsed_entries(path, document, "cells", CellResult.from_dict))
    )


# --- What the times say ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A pair's measurements."""

    pair: Pair
    tflops: tuple[float, float]
    ratio: float
    """Speed of the second kernel relative to the first."""
    outcome: Outcome

    @property
    def is_as_claimed(self) -> bool | None:
        """None where the documents say nothing."""
        if self.pair.expected is Expected.NOTHING:
            return None
        if self.pair.expected is Expected.NO_GAIN:
            return self.ratio <= 1 + LITTLE_GAIN
        return self.outcome is Outcome.FASTER


def findings(results: ClaimResults, claim: Claim) -> list[Found | str]:
    """For each pair of a claim, what was found, or why nothing was."""
    equal_within = max(spread(results), LEAST_DIFFERENCE)
    by_cell = {result.cell: result for result in results.cells}
    return [_finding(pair, by_cell.get(pair.cell), equal_within) for pair in claim.pairs]


def _finding(pair: Pair, result: CellResult | None, equal_within: float) -> Found | str:
    names = [config.short_form() for config in (pair.first, pair.second)]
    if result is None:
        return "not measured"
    for name in names:
        if name not in result.measurements:
            return result.failures.get(name, "not measured")
    first_ms, second_ms = (result.measurements[name].gpu_ms for name in names)
    ratio = first_ms / second_ms
    outcome = Outcome.EQUAL
    if abs(ratio - 1) > equal_within:
        outcome = Outcome.FASTER if ratio > 1 else Outcome.SLOWER
    return Found(pair, (pair.cell.tflops(first_ms), pair.cell.tflops(second_ms)), ratio, outcome)


def spread(results: ClaimResults) -> float:
    """The largest relative difference between two timings of the same kernel; 0 if none was timed twice."""
    return max(
        (
            abs(measured.gpu_ms / again.gpu_ms - 1)
            for result in results.cells
            for name, measured in result.measurements.items()
            if (again := result.measurements.get(name + AGAIN)) is not None
        ),
        default=0.0,
    )


def verdict(found: Sequence[Found | str]) -> str:
    """In how many of the measured conditions a claim holds; and, of a claim with two sides, on which."""
    measured = [each for each in found if isinstance(each, Found)]
    claimed = [each for each in measured if each.is_as_claimed is not None]
    if not claimed:
        return "no claim" if measured else "not measured"
    text = f"holds in {_count(claimed)} conditions"
    sides = {expected: [each for each in claimed if each.pair.expected is expected] for expected in Expected}
    faster, little = sides[Expected.FASTER], sides[Expected.NO_GAIN]
    if faster and little:
        text += f" (in {_count(faster)} that should be faster, {_count(little)} that should gain little)"
    return text


def _count(found: Sequence[Found]) -> str:
    """How many are as claimed."""
    right = sum(each.is_as_claimed is True for each in found)
    return {len(found): f"all {right}", 0: f"none of {len(found)}"}.get(right, f"{right} of {len(found)}")
