"""Decoding: several configs beside each other and beside PyTorch's SDPA, on the problems of the package's figures.

    PYTHONPATH=src python benchmarks/decode.py [--config SHORT_FORM …] [--rows decode,chunk,paged,uneven]
        [--only PATTERN] [--json FILE]

Needs a GPU. What is measured, and how, is that of `flashwright bench --operation decode`, which times one config or
what `attention()` chooses. "decode" and "chunk" are its usual problems; "paged" is a cache in shuffled pages beside the
same in one piece, "uneven" sequences of very different lengths beside even ones of the same total. `flashwright bench
--from FILE` shows what was stored.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

from flashwright.kernels.registry import parse_config
from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.cache_cells import UNEVEN_PAGE, cache_cell, cache_cells, usual_cells
from flashwright.workbench.bench.gpu_machine import GPUMachine, prepare_ours
from flashwright.workbench.bench.grid import Cell
from flashwright.workbench.bench.measure import Prepare, measure_cell
from flashwright.workbench.bench.peers import PEERS
from flashwright.workbench.bench.results import OURS, BenchResult, ours_of, short_label_of, write_result
from flashwright.workbench.bench.training import prepare_operation
from flashwright.workbench.environment import environment_record


def problems() -> dict[str, list[Cell]]:
    usual = usual_cells()
    uneven = cache_cell(DType.BF16, 1, 65_536, batch=64, uneven=True)
    pages = sum(-(-length // UNEVEN_PAGE) for length in uneven.lengths) // uneven.batch
    return {
        "decode": [cell for cell in usual if cell.rows == 1],
        "chunk": [cell for cell in usual if cell.rows > 1],
        "paged": cache_cells(DType.BF16, pages=(0, 16, 64, 256)),
        "uneven": [uneven, replace(uneven, uneven=False, length=pages * UNEVEN_PAGE)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", default=[], help="a decode config by its short form, beside ours")
    parser.add_argument("--rows", default="decode,chunk,paged,uneven")
    parser.add_argument("--only", default="", help="a regular expression that the names of problems match")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    configs = {text: parse_config(text) for text in options.config}
    peers: dict[str, Prepare] = {
        name: partial(prepare_operation, PEERS[name].prepare) for name in ("sdpa-cudnn", "sdpa-fa2")
    }
    machine, results = GPUMachine(), []
    for kind in options.rows.split(","):
        for cell in problems()[kind]:
            if not re.search(options.only, str(cell)):
                continue
            fitting = {text: config for text, config in configs.items() if config.d_head == cell.d_head}
            ours: dict[str, Prepare] = {ours_of(text): partial(prepare_ours, config=c) for text, c in fitting.items()}
            found = measure_cell(machine, cell, {OURS: prepare_ours} | ours | peers)
            results.append(found)
            columns = [
                f"{short_label_of(name)} {1e3 * measured.gpu_ms:8.1f} µs {found.speed(name):5.2f} TB/s"
                for name, measured in found.measurements.items()
            ]
            print(f"{kind:7s} {cell!s:32s} {'  '.join(columns)}", flush=True)
            for name, why in found.failures.items():
                if not cell.page:
                    print(f"        {name}: {why}", flush=True)
    if options.json:
        write_result(options.json, BenchResult(environment_record(), {"operation": "decode"}, tuple(results)))


if __name__ == "__main__":
    main()
