"""The Ampere family against PyTorch's FlashAttention-2, over head dimensions, masks and lengths, on this machine's GPU.

    PYTHONPATH=src python benchmarks/ampere_grid.py RESULT.json [--dtype BF16]

Hidden size 2048, 16,384 tokens in all, tensors (batch, rows, heads, head_dim). Per cell, every candidate config and the
peer are timed in turns (GPU time, CUDA graphs, medians). The file holds all figures, the table the best candidate.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashwright import compile_many, parse_kernel_name_into_config, run_forward
from flashwright.problem.dtypes import DType
from flashwright.problem.variant import AttentionVariant
from flashwright.problem.window import FULL, Window
from flashwright.workbench.bench.gpu_machine import GPUMachine
from flashwright.workbench.bench.grid import HIDDEN, LENGTHS, cell_of
from flashwright.workbench.bench.peers import flash_attention_2
from flashwright.workbench.bench.result_files import write_document
from flashwright.workbench.bench.results import geometric_mean
from flashwright.workbench.bench.timing import gpu_times_ms
from flashwright.workbench.environment import environment_record

COPIES = "async+eager+swizzled"
CANDIDATES = {
    64: (
        f"128, 128, 4): {COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+reorder+two_stages+lazy",
        f"128, 128, 4): {COPIES}+load_4_4_2_tiles+opt_softmax+mma_sum+two_stages+lazy",
        f"128, 128, 4): {COPIES}+load_4_4_2_tiles+opt_softmax+mma_sum+lazy",
    ),
    128: (
        f"128, 64, 4): {COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+reorder+two_stages+lazy",
        f"128, 64, 4): {COPIES}+load_2_2_0_tiles+buffer+opt_softmax+mma_sum+two_stages+lazy",
        f"128, 64, 4): {COPIES}+load_2_2_2_tiles+opt_softmax+stride_{HIDDEN}+mma_sum+reorder+two_stages+lazy",
    ),
    256: (
        f"64, 32, 4): {COPIES}+load_0_2_2_tiles+opt_softmax+mma_sum+reorder+two_stages+lazy",
        f"64, 32, 4): {COPIES}+load_0_2_2_tiles+opt_softmax+stride_{HIDDEN}+mma_sum+reorder+two_stages+lazy",
        f"64, 64, 4): {COPIES}+load_2_2_2_tiles+buffer+opt_softmax+lazy",
        f"64, 64, 4): {COPIES}+load_2_2_2_tiles+buffer+opt_softmax+stride_{HIDDEN}+lazy",
        f"64, 64, 4): {COPIES}+load_4_4_2_tiles+opt_softmax+stride_{HIDDEN}+lazy",
    ),
}


def measure_cell(dtype: str, d_head: int, causal: bool, length: int) -> dict[str, Any]:
    cell = cell_of(DType.parse(dtype), d_head, causal, length)
    inputs = GPUMachine().inputs(cell)
    q, k, v = inputs.q, inputs.k, inputs.v
    out, window = torch.empty_like(q), Window(right=0) if causal else FULL
    launches: dict[Any, Any] = {"FlashAttention-2": partial(flash_attention_2, q, k, v, causal=causal)}
    for text in CANDIDATES[d_head]:
        config = parse_kernel_name_into_config(f"({dtype}, {d_head}, {text}")
        launches[config.short_form()] = partial(run_forward, config, q, k, v, window=window, out=out)
    times = gpu_times_ms(launches, launches=5, rounds=7)
    peer_ms = times.pop("FlashAttention-2")
    best = min(times, key=times.__getitem__)
    return {
        "dtype": dtype,
        "d_head": d_head,
        "causal": causal,
        "length": length,
        "peer_tflops": cell.tflops(peer_ms),
        "tflops": cell.tflops(times[best]),
        "ratio": peer_ms / times[best],
        "best": best,
        "ratios": {name: peer_ms / time for name, time in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--dtype", choices=("BF16", "FP16"), default="BF16")
    options = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    for variant in (AttentionVariant(), AttentionVariant(masks_right=True)):
        configs = [
            parse_kernel_name_into_config(f"({options.dtype}, {d}, {t}") for d in CANDIDATES for t in CANDIDATES[d]
        ]
        compile_many(configs, f"sm_{major}{minor}", variant)
    cells = []
    for d_head in CANDIDATES:
        for causal in (False, True):
            row = [measure_cell(options.dtype, d_head, causal, length) for length in LENGTHS]
            cells += row
            figures = "  ".join(f"{cell['tflops']:4.0f} {cell['ratio']:.3f}" for cell in row)
            print(f"{options.dtype} d_head {d_head:3} {'causal' if causal else 'full':6}  {figures}", flush=True)
    mean = geometric_mean(cell["ratio"] for cell in cells)
    print(f"geometric mean of the ratios: {mean:.3f}; smallest: {min(cell['ratio'] for cell in cells):.3f}")
    write_document(options.result, {"environment": environment_record(), "geometric_mean": mean, "cells": cells})


if __name__ == "__main__":
    main()
