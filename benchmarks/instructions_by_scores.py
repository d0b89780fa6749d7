"""How many instructions the kernels execute, by kind of scores, on the simulated GPU.

    PYTHONPATH=src python benchmarks/instructions_by_scores.py [--keys 1024] [--scores normal,falling-fast] [CONFIG ...]

Needs PyTorch, but no GPU. Simulates one tile of query rows that attends to all keys, by default with a fast config of
each family at d_head 128. Prints a Markdown table: the PTX instructions of warps per 1,000 scores, and beside normal
scores.
"""

from __future__ import annotations

import argparse

import torch

from flashwright import parse_config, simulate_forward
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_of
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.workbench.bench.scores import ALL, KINDS, NORMAL, score_inputs

CONFIGS = (
    "hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy+guess+first",
    "(BF16, 128, 128, 64, 4): "
    "async+eager+swizzled+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
)


def instructions_per_1000_scores(config: KernelConfig, kind: str, keys: int) -> float:
    inputs = score_inputs(
        kind, batch=1, heads=1, q_length=config.B_r, kv_length=keys, d_head=config.d_head, dtype=torch.bfloat16
    )
    q, k, v = (x.float().numpy().astype(NUMPY_DTYPES[config.dtype]) for x in inputs)
    run = simulate_forward(config, q, k, v, check_hazards=False).run
    return run.counters.executed / (config.B_r * keys) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="CONFIG", help="short forms, of BF16")
    parser.add_argument("--keys", type=int, default=1024)
    parser.add_argument("--scores", default=ALL, help="kinds, separated by commas; default: all")
    arguments = parser.parse_args()
    kinds = list(KINDS) if arguments.scores == ALL else arguments.scores.split(",")
    configs = [parse_config(text) for text in arguments.configs]
    normal = [instructions_per_1000_scores(config, NORMAL, arguments.keys) for config in configs]
    print("| scores |", " | ".join(f"{family_of(config).name} | ÷ normal" for config in configs), "|")
    print("| --- |", " | ".join("---: | ---:" for _ in configs), "|")
    for kind in kinds:
        found = (instructions_per_1000_scores(config, kind, arguments.keys) for config in configs)
        columns = (f"{each:.1f} | {each / usual:.2f}" for each, usual in zip(found, normal, strict=True))
        print(f"| `{kind}` |", " | ".join(columns), "|", flush=True)


if __name__ == "__main__":
    main()
