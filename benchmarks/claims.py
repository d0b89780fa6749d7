"""What the documents claim about the Ampere family's knobs, timed on this machine's GPU: the figures of docs/claims.md.

    PYTHONPATH=src python benchmarks/claims.py RESULT.json [--rounds N]

Eager loading by length (64 to 16,384 rows); double buffering by d_head, B_c, dtype and softmax mode; K load tiles of 2
and 4 fragments against the whole block; the last two also with `keep_order`, where machine code has the kernel's order.
All kernels of a problem run in one process in turns of random order (GPU time, CUDA graphs, medians); the first of each
problem is timed twice, to show the spread. Hidden size 2048, 16,384 tokens in all, no mask. A kernel that fails is
recorded with its reason.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from knob_effects import Machine, compile_all, prepare

from flashwright.runtime.progress import progress_bar
from flashwright.workbench.bench.claims import (
    ClaimResults,
    Found,
    check_buildable,
    claims,
    configs_by_cell,
    findings,
    measure_claims,
    spread,
    verdict,
    write_claims,
)
from flashwright.workbench.bench.knob_effects import ROUNDS
from flashwright.workbench.bench.result_files import check_destination
from flashwright.workbench.environment import environment_record


def measured(rounds: int) -> ClaimResults:
    machine, every = Machine(rounds=rounds), claims()
    check_buildable(every)
    problems = configs_by_cell(every)
    compile_all(list(dict.fromkeys(config for configs in problems.values() for config in configs)))
    with progress_bar("timing", len(problems)) as advance:
        cells = measure_claims(machine, every, prepare, advance=advance)
    return ClaimResults(environment_record() | {"rounds": rounds}, cells)


def print_table(results: ClaimResults) -> None:
    """A line per condition: times the first kernel's speed, and what the documents say."""
    for claim in claims():
        found = findings(results, claim)
        print(f"\n{claim.title}: {verdict(found)}")
        for pair, each in zip(claim.pairs, found, strict=True):
            print(f"  {pair.condition:60} {_figures(each)}")
    print(f"\nthe same kernel timed twice differs by up to {spread(results):.1%}")


def _figures(found: Found | str) -> str:
    if isinstance(found, str):
        return found
    return f"{found.ratio:.3f}  {found.outcome.value:13} claimed: {found.pair.expected.value}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each kernel (default: %(default)s)")
    options = parser.parse_args()
    check_destination(options.result)
    results = measured(options.rounds)
    write_claims(options.result, results)
    print_table(results)


if __name__ == "__main__":
    main()
