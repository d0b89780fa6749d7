"""Errors of attention() against float64 beside PyTorch's, on every kind of scores, on this machine's GPU.

    PYTHONPATH=src python benchmarks/accuracy.py [--scores all] [--family ampere,hopper] [--heads 4]
        [--output RESULT.json]

Kinds of scores × dtypes × head dimensions × masks × lengths, for every family that the GPU runs. The largest error may
be twice that of eager attention in the same dtype, the root mean square 1.2 times that of PyTorch's FlashAttention-2,
1.06 times on normal scores. The table has the worst ratio of each kind; the exit code is 1 if any is above its limit.

Where rows do not fill the GPU, PyTorch's FlashAttention-2 computes parts of the keys apart, each with a maximum of its
own that is exact, and its errors are smaller by several percent. More `--heads` give its usual kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

from flashwright.kernels.registry import families, family_named
from flashwright.problem.dtypes import DType
from flashwright.runtime.devices import gpu_available, gpu_model
from flashwright.runtime.progress import progress_bar
from flashwright.workbench.bench.error_ratios import (
    LARGEST_LIMIT,
    NORMAL_RMS_LIMIT,
    RMS_LIMIT,
    ErrorRatios,
    Failure,
    error_ratios,
    worst_by_kind,
)
from flashwright.workbench.bench.gpu_machine import GPUMachine, prepare_ours
from flashwright.workbench.bench.grid import D_HEADS, MASKS, Cell, cell_of
from flashwright.workbench.bench.measure import Prepare
from flashwright.workbench.bench.result_files import check_destination, write_document
from flashwright.workbench.bench.results import ours_of
from flashwright.workbench.bench.scores import ALL, chosen_scores
from flashwright.workbench.environment import environment_record

LENGTHS = (200, 512, 2048, 8192)
"""The first fits no block."""
HEADS = 4


def cells_of(
    scores: Sequence[str], dtypes: Sequence[str], d_heads: Sequence[int], lengths: Sequence[int], heads: int
) -> list[Cell]:
    return [
        cell_of(DType.parse(dtype), d_head, causal, length, batch=1, heads=heads, scores=kind)
        for dtype, d_head, causal, length, kind in product(dtypes, d_heads, MASKS, lengths, scores)
    ]


def ours(names: Sequence[str] | None) -> dict[str, Prepare]:
    """attention() with each of these families, or with every one that this GPU runs."""
    import torch

    arch = gpu_model(torch.cuda.current_device()).arch
    names = names or [family.name for family in families() if family.runs_on(arch)]
    return {ours_of(name): partial(prepare_ours, family=family_named(name).name) for name in names}


def print_worst(found: Sequence[ErrorRatios], failures: Sequence[Failure]) -> None:
    print(f"{'':22}{'scores':14}{'largest ÷ eager':>16}  {'at':25}{'rms ÷ FA-2':>11}  at")
    for (name, scores), (largest, rms) in worst_by_kind(found).items():
        line = f"{name:22}{scores:14}{largest.largest_ratio:16.2f}  {place(largest.cell):25}"
        line += f"{rms.rms_ratio:11.3f}  {place(rms.cell):25}"
        exceeded = not (largest.within_limits and rms.within_limits)
        print(f"{line}{'  above the limit' if exceeded else ''}".rstrip())
    for failure in failures:
        print(f"failed: {failure.name}, {failure.cell.scores}, {place(failure.cell)}: {failure.reason}")
    above = sum(not each.within_limits for each in found)
    print(
        f"{above} of {len(found)} above a limit: largest {LARGEST_LIMIT:g}, rms {RMS_LIMIT:g}, on normal scores "
        f"{NORMAL_RMS_LIMIT:g}; {len(failures)} failed"
    )


def place(cell: Cell) -> str:
    return f"{cell.dtype.name} {cell.d_head} {cell.mask} {cell.length}"


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", default=ALL, help="kinds of scores, with commas")
    parser.add_argument("--dtype", type=names, default=["BF16", "FP16"], help="with commas")
    parser.add_argument("--d-head", type=int, nargs="+", default=D_HEADS)
    parser.add_argument("--seqlen", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--family", type=names, help="with commas; by default all that this GPU runs")
    parser.add_argument("--output", type=Path, help="write all errors to this JSON file")
    options = parser.parse_args()
    if options.output:
        check_destination(options.output)
    cells = cells_of(chosen_scores([options.scores]), options.dtype, options.d_head, options.seqlen, options.heads)
    if not gpu_available():
        raise SystemExit("PyTorch sees no CUDA GPU on this machine")
    with progress_bar("comparing", len(cells)) as advance:
        found, failures = error_ratios(GPUMachine().inputs, cells, ours(options.family), advance=advance)
    if options.output:
        document = {
            "environment": environment_record(),
            "limits": {"largest": LARGEST_LIMIT, "rms": RMS_LIMIT, "rms_normal": NORMAL_RMS_LIMIT},
            "cells": [each.to_dict() for each in found],
            "failures": [failure.to_dict() for failure in failures],
        }
        write_document(options.output, document)
    print_worst(found, failures)
    return 0 if not failures and all(each.within_limits for each in found) else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
