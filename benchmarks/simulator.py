"""How fast the simulator loads and runs kernels: the package's own, and those of other people in its tests.

    python benchmarks/simulator.py [--repeats 5] [--case NAME] [--output FILE] [--compare FILE [--limit 1.25]]

Of every kernel: seconds to load it without and with its parsed form on disk, and to run it with hazards checked and
ignored. `--output` writes the measurements; `--compare` sets them beside those of a file from the same machine, and
ends with exit code 1 if anything takes longer than `--limit` times as long. Needs no GPU; compiling is not timed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import flashwright
from flashwright import compile_kernel, parse_config, random_inputs, simulate_forward
from flashwright.compiler.program_cache import CACHE_DIRECTORY_VARIABLE
from flashwright.simulator import SimulatedGPU
from flashwright.simulator.module import Module
from flashwright.simulator.parsed_modules import parsed
from flashwright.simulator.run import Run

FOREIGN = Path(__file__).resolve().parents[1] / "tests" / "simulator" / "data"
OWN = {
    "ampere": "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
    "hopper": "hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy",
}
# What takes less is repeated until it has taken this long in all.
SHORTEST_S = 0.2


@dataclass(frozen=True)
class Measurement:
    """Seconds: of several times the shortest."""

    kernel: str
    instructions: int
    warp_instructions: int
    load_s: float
    load_cached_s: float
    checked_s: float
    unchecked_s: float


@dataclass(frozen=True)
class Case:
    """A kernel: its PTX, and how it is launched with hazards checked or not."""

    ptx: str
    arch: str
    run: Callable[[bool], Run]


def own_case(short_form: str) -> Case:
    """The forward kernel of a config on 2 heads of 256 rows."""
    config = parse_config(short_form)
    inputs = random_inputs(config, heads=2, rows=256)
    kernel = compile_kernel(config)
    return Case(kernel.ptx, kernel.arch, lambda checks: simulate_forward(config, *inputs, check_hazards=checks).run)


def foreign_case(
    file: str,
    arch: str,
    grid: Sequence[int] | int,
    block: int,
    shared_bytes: int,
    arguments: Callable[[SimulatedGPU], Sequence[Any]],
    kernel: str | None = None,
) -> Case:
    """A kernel of a PTX file, the only one unless it is named."""
    data = (FOREIGN / file).read_bytes()
    ptx = (gzip.decompress(data) if file.endswith(".gz") else data).decode()

    def run(checks: bool) -> Run:
        gpu = SimulatedGPU(arch)
        module = gpu.load(ptx)
        name = kernel or module.kernels[0]
        return module.launch(name, grid, block, shared_bytes, arguments(gpu), check_hazards=checks)

    return Case(ptx, arch, run)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def on_device(*items: Any) -> Callable[[SimulatedGPU], Sequence[Any]]:
    """Arguments of which arrays become pointers."""
    return lambda gpu: [gpu.to_device(item) if isinstance(item, np.ndarray) else item for item in items]


def nvcc_saxpy() -> Case:
    x, y = random(1 << 20), random(1 << 20)
    return foreign_case("nvcc_saxpy.ptx", "sm_80", 512, 256, 0, on_device(y, x, np.float32(2), np.int32(x.size)))


def triton_softmax() -> Case:
    x = random(512, 200)
    return foreign_case(
        "triton_softmax.ptx", "sm_80", 512, 128, 16, on_device(x, np.zeros_like(x), np.int32(200), 0, 0)
    )


def triton_matmul() -> Case:
    a, b = (random(*shape).astype(ml_dtypes.bfloat16) for shape in ((2048, 512), (512, 64)))
    out = np.zeros((2048, 64), np.float32)
    return foreign_case("triton_matmul.ptx", "sm_80", 32, 128, 16384, on_device(a, b, out, np.int32(512), 0, 0))


def triton_attention(file: str, arch: str, shared_bytes: int) -> Case:
    q, k, v, out = (random(4, 384, 64).astype(ml_dtypes.bfloat16) for _ in range(4))
    arguments = on_device(q, k, v, out, random(4, 384), np.int32(384), np.float32(0.125), 0, 0)
    return foreign_case(file, arch, (6, 4), 128, shared_bytes, arguments)


def flash_attention_2() -> Case:
    def arguments(gpu: SimulatedGPU) -> Sequence[Any]:
        """One structure: eleven pointers (q, k, v, o, …, lse, …), sizes, scale."""
        q, k, v, out = (gpu.to_device(random(1, 256, 4, 64).astype(ml_dtypes.bfloat16)) for _ in range(4))
        lse = gpu.to_device(random(1, 4, 256))
        return [struct.pack("<11Q5if", q, k, v, out, 0, 0, 0, 0, lse, 0, 0, 1, 4, 4, 256, 256, 0.125)]

    return foreign_case(
        "nvcc_flash_attention_2.ptx.gz", "sm_80", (4, 1, 4), 128, 3 * 64 * 64 * 2, arguments, "fa2_forward"
    )


CASES: dict[str, Callable[[], Case]] = {
    **{name: (lambda short_form=short_form: own_case(short_form)) for name, short_form in OWN.items()},
    "nvcc-saxpy": nvcc_saxpy,
    "triton-softmax": triton_softmax,
    "triton-matmul": triton_matmul,
    "triton-attention-mma": lambda: triton_attention("triton_attention_sm80.ptx.gz", "sm_80", 40960),
    "triton-attention-wgmma": lambda: triton_attention("triton_attention_sm90.ptx.gz", "sm_90a", 57344),
    "flash-attention-2": flash_attention_2,
}


def measure(name: str, case: Case, repeats: int) -> Measurement:
    module = load(case)
    runs = {checks: case.run(checks) for checks in (True, False)}  # also fills caches
    return Measurement(
        kernel=name,
        instructions=sum(len(module.program(kernel).code) for kernel in module.kernels),
        warp_instructions=runs[True].counters.executed,
        load_s=fastest_s(lambda: load_s(case, forget_on_disk), repeats),
        load_cached_s=fastest_s(lambda: load_s(case, parsed.cache_clear), repeats),
        checked_s=fastest_s(lambda: case.run(True).elapsed_s, repeats),
        unchecked_s=fastest_s(lambda: case.run(False).elapsed_s, repeats),
    )


def load(case: Case) -> Module:
    return SimulatedGPU(case.arch).load(case.ptx)


def load_s(case: Case, before: Callable[[], None]) -> float:
    before()
    started = time.perf_counter()
    load(case)
    return time.perf_counter() - started


def forget_on_disk() -> None:
    """As if no module had ever been parsed."""
    parsed.cache_clear()
    for entry in (Path(os.environ[CACHE_DIRECTORY_VARIABLE]) / "simulator").glob("*"):
        entry.unlink()


def fastest_s(timed: Callable[[], float], repeats: int) -> float:
    times: list[float] = []
    while len(times) < repeats or sum(times) < SHORTEST_S:
        times.append(timed())
    return min(times)  # other work on the machine only adds


TIMES = ("load_s", "load_cached_s", "checked_s", "unchecked_s")


def compared(now: Sequence[Measurement], before: dict[str, Any], limit: float) -> bool:
    """Print the ratios to earlier measurements; whether nothing exceeds the limit."""
    earlier = {item["kernel"]: item for item in before["measurements"]}
    slower = []
    print(f"\n{'times as long as before':<24}" + "".join(f"{name[:-2]:>14}" for name in TIMES))
    for item in now:
        if item.kernel not in earlier:
            continue
        ratios = {name: getattr(item, name) / earlier[item.kernel][name] for name in TIMES}
        print(f"{item.kernel:<24}" + "".join(f"{ratios[name]:>14.2f}" for name in TIMES))
        slower += [f"{item.kernel}: {name[:-2]} {ratio:.2f}" for name, ratio in ratios.items() if ratio > limit]
    if slower:
        print(f"slower than {limit} times: {'; '.join(slower)}")
    return not slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each; the fastest counts")
    parser.add_argument("--case", action="append", choices=CASES, help="only this kernel; may be given several times")
    parser.add_argument("--output", type=Path, help="write the measurements to this JSON file")
    parser.add_argument("--compare", type=Path, help="a file of an earlier --output, from the same machine")
    parser.add_argument("--limit", type=float, default=1.25, help="how many times as long is too long")
    options = parser.parse_args()
    before = None if options.compare is None else json.loads(options.compare.read_text())
    header = f"{'kernel':<24}{'instructions':>14}{'executed':>14}" + "".join(f"{name:>14}" for name in TIMES)
    print(header)
    measurements = []
    for name in options.case or CASES:
        item = measure(name, CASES[name](), options.repeats)
        measurements.append(item)
        times = "".join(f"{getattr(item, time_name):>14.3f}" for time_name in TIMES)
        print(f"{item.kernel:<24}{item.instructions:>14,}{item.warp_instructions:>14,}{times}", flush=True)
    if options.output is not None:
        document = {
            "version": flashwright.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "date": time.strftime("%Y-%m-%d"),
            "measurements": [asdict(item) for item in measurements],
        }
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    if before is not None and not compared(measurements, before, options.limit):
        sys.exit(1)


if __name__ == "__main__":
    # Of its own, so that loading without parsed modules on disk can be measured; kernels are compiled into it once.
    with tempfile.TemporaryDirectory() as directory:
        os.environ[CACHE_DIRECTORY_VARIABLE] = directory
        main()
