"""Tuning: find the fastest config for a problem on this GPU, and see that `attention()` uses it.

python examples/tune_your_gpu.py [--d-head 128] [--rows 4096] [--configs 16]

Without a GPU the candidates are compiled and listed with their registers and occupancy; nothing is timed or stored.
`flashwright tune` is the same with more options, `--all` for every head dimension, dtype and mask.
"""

from __future__ import annotations

import argparse

import flashwright as fw
from flashwright.choice.database import TuningDatabase
from flashwright.choice.problem import problem_of
from flashwright.hardware.models import gpu_named
from flashwright.operators.chosen import CallProblem, kernel_choice
from flashwright.problem.options import AttentionOptions
from flashwright.workbench.tuning.measure import this_machine
from flashwright.workbench.tuning.reload import reload
from flashwright.workbench.tuning.tuner import tune


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--d-head", type=int, default=128)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--configs", type=int, default=16, help="how many candidates to try, the promising first")
    options = parser.parse_args()
    machine = this_machine()
    gpu = machine.gpu if machine is not None else gpu_named("a100")
    call = CallProblem(fw.DType.BF16, options.d_head, options.rows, options.rows, AttentionOptions())
    before = kernel_choice(call, gpu)
    print(f"before: {before}")

    problem = problem_of(family=before.family, d_head=options.d_head, q_length=options.rows)
    report = tune(problem, machine, TuningDatabase(), arch=gpu.arch, quick=True, limit=options.configs)
    if report.result is None:
        assert report.candidates is not None
        for candidate in report.candidates.survivors:
            print(f"{candidate.registers:3} registers, {candidate.blocks_per_sm} blocks per SM: {candidate.config}")
        print("no GPU here: nothing was timed")
        return
    for timing in report.final_timings:
        print(f"{timing.time_ms:.4f} ms  {timing.config}")
    reload()
    print(f"after: {kernel_choice(call, gpu)}")


if __name__ == "__main__":
    main()
