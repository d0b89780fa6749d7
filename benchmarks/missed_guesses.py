"""How many steps of the Hopper kernel lift a reference, compute scores twice, or search, by kind of scores: a model.

    PYTHONPATH=src python benchmarks/missed_guesses.py [--keys 8192] [--rows 256] [--d-head 128] [--block-keys 128]

Needs PyTorch, but no GPU: the model of workbench/bench/guesses.py follows the kernel's rules in NumPy, on rows of one
head from all over a causal and a full problem. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch

from flashwright.kernels.forward.hopper.config import WARPGROUP_ROWS
from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.guesses import Guesses, guesses
from flashwright.workbench.bench.scores import KINDS, score_inputs


def guesses_of(kind: str, keys: int, rows: int, d_head: int, block_keys: int, *, causal: bool) -> Guesses:
    """Of warpgroups spread evenly over the rows of a head, in bf16."""
    q, k, _ = (
        x[0, 0].double().numpy()
        for x in score_inputs(kind, batch=1, heads=1, q_length=keys, d_head=d_head, dtype=torch.bfloat16)
    )
    found, groups = Guesses(), rows // WARPGROUP_ROWS
    for group in range(groups):
        first = (group + 1) * keys // groups - WARPGROUP_ROWS
        scores = q[first : first + WARPGROUP_ROWS] @ k.T * (math.log2(math.e) / math.sqrt(d_head))
        if causal:
            position = np.arange(first, first + WARPGROUP_ROWS)
            scores[np.arange(keys)[None] > position[:, None]] = -np.inf
        found.add(guesses(scores, DType.BF16, block_keys))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--d-head", type=int, default=128)
    parser.add_argument("--block-keys", type=int, default=128)
    arguments = parser.parse_args()
    print(
        "| kind | mask | steps that lift | computed twice | with care after that |\n| --- | --- | ---: | ---: | ---: |"
    )
    for kind in KINDS:
        for causal in (False, True):
            found = guesses_of(
                kind, arguments.keys, arguments.rows, arguments.d_head, arguments.block_keys, causal=causal
            )
            shares = (100 * part / max(found.steps, 1) for part in (found.lifted, found.overflowed, found.with_care))
            mask = "causal" if causal else "full"
            print(f"| `{kind}` | {mask} | " + " | ".join(f"{share:.1f}%" for share in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
