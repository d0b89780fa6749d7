"""How fast the simulator runs the forward kernel of the last rung, with and without hazard checking.

    python benchmarks/simulator_speed.py [--heads 2] [--seqlen 256] [--repeats 3] [--json]

The problem that the limits are stated for is batch 1, 2 heads, 256 rows, d_head 128. A second, four times larger
problem shows that the cost grows with thread blocks × KV steps. Compile time is not included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import ml_dtypes
import numpy as np

from flashwright.compiler.kernel import Kernel
from flashwright.kernels.forward.ampere.ladder import get_kernel_progression_configs
from flashwright.kernels.registry import family_of
from flashwright.kernels.tensors import DeviceTensor
from flashwright.runtime.compiling import compile_kernel
from flashwright.simulator.gpu import SimulatedGPU

LIMIT_S = {True: 1.5, False: 0.5}


def simulate(kernel: Kernel, heads: int, seqlen: int, check_hazards: bool, repeats: int) -> dict[str, Any]:
    """Median seconds of a launch, and what it cost per thread block and KV step."""
    config = kernel.config
    rng = np.random.default_rng(0)
    shape = (1, heads, seqlen, config.d_head)
    gpu = SimulatedGPU("sm_80")
    started = time.perf_counter()
    module = gpu.load(kernel.ptx)
    load_s = time.perf_counter() - started
    tensors = []
    for name in "qkvo":
        array = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        strides = tuple(stride // array.itemsize for stride in array.strides)
        tensors.append(DeviceTensor(name, gpu.to_device(array), config.dtype, array.shape, strides))
    launch = family_of(config).launch(config, *tensors, multiprocessors=1)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run = module.launch(
            kernel.name,
            launch.grid,
            kernel.threads,
            kernel.shared_bytes,
            [bytes(launch.arguments)],
            check_hazards=check_hazards,
        )
        times.append(time.perf_counter() - started)
    time_s = statistics.median(times)
    steps = launch.grid[0] * (seqlen // config.B_c)
    return {
        "heads": heads,
        "seqlen": seqlen,
        "check_hazards": check_hazards,
        "load_s": load_s,
        "time_s": time_s,
        "block_steps": steps,
        "ms_per_block_step": 1e3 * time_s / steps,
        "million_warp_instructions_per_s": run.counters.executed / time_s / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    options = parser.parse_args()
    kernel = compile_kernel(get_kernel_progression_configs()[-1], "sm_80")
    results = [
        simulate(kernel, heads, options.seqlen, check_hazards, options.repeats)
        for heads in (options.heads, 4 * options.heads)
        for check_hazards in (True, False)
    ]
    if options.json:
        print(json.dumps({"config": kernel.config.short_form(), "results": results}, indent=2))
        return
    print(kernel.config.short_form())
    print(f"{'heads':>5} {'seqlen':>6} {'hazards':>7} {'load s':>7} {'run s':>7} {'limit s':>7} {'ms/block/step':>13}")
    for result in results:
        limit = f"{LIMIT_S[result['check_hazards']]:.1f}" if result["heads"] == options.heads else ""
        print(
            f"{result['heads']:>5} {result['seqlen']:>6} {result['check_hazards']!s:>7} {result['load_s']:>7.2f} "
            f"{result['time_s']:>7.3f} {limit:>7} {result['ms_per_block_step']:>13.2f}"
        )


if __name__ == "__main__":
    main()
