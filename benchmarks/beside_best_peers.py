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
from pathlib import Path

from flashwright.workbench.bench.best_peers import best_over_common, leads
from flashwright.workbench.bench.results import geometric_mean, read_result

PEERS = Path(__file__).parent / "results/peers_h200.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files that `flashwright bench` has written")
    parser.add_argument("--least", type=float, default=1.0, help="how many times as fast as its peer ours should be")
    options = parser.parse_args()
    best, short, cells = best_over_common(PEERS), 0, 0
    for path in options.results:
        result = read_result(path)
        print(f"{path}: {result.operation}, {str(result.environment.get('date'))[:10]}, ÷ its peer")
        for name, kind, found in leads(result, best):
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
