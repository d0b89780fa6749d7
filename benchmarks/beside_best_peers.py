"""Stored results of `flashwright bench` beside the fastest peers of an H200, of which FlashAttention-3 and -4 are
seldom installed.

    PYTHONPATH=src python benchmarks/beside_best_peers.py RESULT.json [RESULT.json …] [--least 1.05]

`results/peers_h200.json` has the speeds of cuDNN, FlashAttention-2, -3 and -4 in one process. What the fastest of them
has over cuDNN is a ratio that outlives the run: where ours over cuDNN, measured beside it, is larger, ours is ahead of
all four. The Ampere family's peer is FlashAttention-2, which was measured beside it.

Prints, per implementation of ours and kind of scores, how far ahead it is: in the geometric mean, in the worst cell,
and the cells that fall short of `--least` (1). The exit code is 1 if any does. Needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.result_files import parsed_entries, read_document
from flashwright.workbench.bench.results import BenchResult, CellResult, geometric_mean, ours_of, read_result

PEERS = Path(__file__).parent / "results/peers_h200.json"
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


def best_over_common() -> dict[Problem, float]:
    """By problem, how many times as fast as the common peer the fastest is."""

    def parsed(values: Mapping[str, Any]) -> tuple[Problem, float]:
        speeds = values["tflops"]
        problem = Problem(values["operation"], values["d_head"], values["causal"], values["length"])
        return problem, max(speeds.values()) / speeds[COMMON]

    document = read_document(PEERS, holding="cells", made_by=Path(__file__).name)
    return dict(parsed_entries(PEERS, document, "cells", parsed))


def leads(result: BenchResult, best: Mapping[Problem, float]) -> Iterator[tuple[str, str, list[Lead]]]:
    """Of each of ours on each kind of scores, in the cells whose peer was measured."""
    for name in result.ours():
        for kind in result.kinds():
            ratios = ((lead(each, name, best), each.cell) for each in result.of_kind(kind).cells)
            found = [Lead(ratio, cell) for ratio, cell in ratios if ratio is not None]
            if found:
                yield name, kind, found


def lead(found: CellResult, name: str, best: Mapping[Problem, float]) -> float | None:
    if name in PEER_OF_FAMILY:
        return found.ratio(PEER_OF_FAMILY[name], name)
    over_common, target = found.ratio(COMMON, name), best.get(Problem.of(found.cell))
    return None if over_common is None or target is None else over_common / target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files that `flashwright bench` has written")
    parser.add_argument("--least", type=float, default=1.0, help="how many times as fast as its peer ours should be")
    options = parser.parse_args()
    best, short, cells = best_over_common(), 0, 0
    for path in options.results:
        result = read_result(path)
        print(f"{path}: {result.operation}, {str(result.environment.get('date'))[:10]}, ÷ its peer")
        for name, kind, found in leads(result, best):
            found.sort(key=lambda each: each.ratio)
            below = [f"{each.cell} {each.ratio:.2f}" for each in found if each.ratio < options.least]
            mean, (worst, where) = geometric_mean(each.ratio for each in found), found[0]
            line = f"  {name:21} {kind:13} mean {mean:.3f}, worst {worst:.3f} ({where})"
            print(f"{line}; below {options.least:g}: {', '.join(below)}" if below else line)
            short, cells = short + len(below), cells + len(found)
    print(f"{short} of {cells} cells below {options.least:g} × their peer")
    return 1 if short or not cells else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
