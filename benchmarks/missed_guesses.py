"""How many steps of the kernels have more to do than most, by kind of scores: a model.

    PYTHONPATH=src python benchmarks/missed_guesses.py [--keys 8192] [--rows 256] [--d-head 128] [--block-keys 128]
        [--from-the-last]

Needs PyTorch, but no GPU: the model of workbench/bench/guesses.py follows the kernels' rules in NumPy, on rows of one
head from all over a full and a causal problem. The Hopper kernel visits `--block-keys` keys a step, the first block
before the others unless `--from-the-last` (`first_block_leads`: off); the Ampere kernel 64, with 32 rows a
warp. Prints a Markdown table of the kinds that have any such steps.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch

from flashwright.kernels.forward.hopper.config import WARPGROUP_ROWS
from flashwright.kernels.forward.hopper.shapes import shares_dominance
from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.guesses import Guesses, Rescales, guesses, rescales
from flashwright.workbench.bench.scores import KINDS, score_inputs

AMPERE_BLOCK_KEYS, AMPERE_WARP_ROWS = 64, 32


def followed(
    kind: str, keys: int, rows: int, d_head: int, block_keys: int, *, first_leads: bool, causal: bool
) -> tuple[Guesses, Rescales]:
    """In warpgroups spread evenly over the rows of a head, in bf16; and in the warps of the same rows."""
    q, k, _ = (
        x[0, 0].double().numpy()
        for x in score_inputs(kind, batch=1, heads=1, q_length=keys, d_head=d_head, dtype=torch.bfloat16)
    )
    found, rescaled, groups = Guesses(), Rescales(), rows // WARPGROUP_ROWS
    for group in range(groups):
        first = (group + 1) * keys // groups - WARPGROUP_ROWS
        scores = q[first : first + WARPGROUP_ROWS] @ k.T * (math.log2(math.e) / math.sqrt(d_head))
        if causal:
            position = np.arange(first, first + WARPGROUP_ROWS)
            scores[np.arange(keys)[None] > position[:, None]] = -np.inf
        shares = shares_dominance(d_head)
        found.add(guesses(scores, DType.BF16, block_keys, first_leads=first_leads, shares_dominance=shares))
        rescaled.add(rescales(scores, DType.BF16, AMPERE_BLOCK_KEYS, AMPERE_WARP_ROWS))
    return found, rescaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--d-head", type=int, default=128)
    parser.add_argument("--block-keys", type=int, default=128)
    parser.add_argument("--from-the-last", action="store_true")
    arguments = parser.parse_args()
    first_leads = not arguments.from_the_last
    sizes = (arguments.keys, arguments.rows, arguments.d_head, arguments.block_keys)
    print("| full / causal | Hopper: correct | lift | compute twice | search | Ampere: rescale O |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for kind in KINDS:
        by_mask = [shares(*followed(kind, *sizes, first_leads=first_leads, causal=causal)) for causal in (False, True)]
        if any(map(any, by_mask)):
            columns = (f"{full:.1%} / {causal:.1%}" for full, causal in zip(*by_mask, strict=True))
            print(f"| `{kind}` | {' | '.join(columns)} |", flush=True)


def shares(found: Guesses, rescaled: Rescales) -> tuple[float, ...]:
    parts = (found.corrected, found.lifted, found.overflowed, found.with_care)
    return (*(part / max(found.steps, 1) for part in parts), rescaled.rescaled / max(rescaled.steps, 1))


if __name__ == "__main__":
    main()
