"""Stored results beside the fastest peers of an H200, of which FlashAttention-3 and -4 are seldom installed.

What the fastest of them has over cuDNN, in one process, is a ratio that outlives the run: where ours over cuDNN,
measured beside it, is larger, ours is ahead of all of them. The Ampere family's peer is FlashAttention-2, which was
measured beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.result_files import parsed_entries, read_document
from flashwright.workbench.bench.results import BenchResult, CellResult, ours_of

COMMON = "sdpa-cudnn"
"""The peer that comes with PyTorch, and that both results have."""
PEER_OF_FAMILY = {ours_of("ampere"): "sdpa-fa2"}
"""The peer of implementations that are not measured by the fastest."""


class Problem(NamedTuple):
    """What a cell and a measured peer have in common, whatever the scores."""

    operation: str
    d_head: int
    causal: bool
    length: int

    @classmethod
    def of(cls, cell: Cell) -> Problem:
        return cls(cell.operation, cell.d_head, cell.causal, cell.length)


class Lead(NamedTuple):
    """How many times as fast as its peer ours is in a cell."""

    ratio: float
    cell: Cell


def best_over_common(peers: Path) -> dict[Problem, float]:
    """By problem, how many times as fast as the common peer the fastest is, from a file of measured peers."""

    def parsed(values: Mapping[str, Any]) -> tuple[Problem, float]:
        speeds = values["tflops"]
        problem = Problem(values["operation"], values["d_head"], values["causal"], values["length"])
        return problem, max(speeds.values()) / speeds[COMMON]

    document = read_document(peers, holding="cells", made_by="a measurement of the peers in one process")
    return dict(parsed_entries(peers, document, "cells", parsed))


def leads(result: BenchResult, best: Mapping[Problem, float]) -> Iterator[tuple[str, str, list[Lead]]]:
    """Of each of ours on each kind of scores, in the cells whose peer was measured, the smallest first."""
    for name in result.ours():
        for kind in result.kinds():
            ratios = ((lead(each, name, best), each.cell) for each in result.of_kind(kind).cells)
            found = [Lead(ratio, cell) for ratio, cell in ratios if ratio is not None]
            if found:
                yield name, kind, sorted(found, key=lambda each: each.ratio)


def lead(found: CellResult, name: str, best: Mapping[Problem, float]) -> float | None:
    if name in PEER_OF_FAMILY:
        return found.ratio(PEER_OF_FAMILY[name], name)
    over_common, target = found.ratio(COMMON, name), best.get(Problem.of(found.cell))
    return None if over_common is None or target is None else over_common / target
