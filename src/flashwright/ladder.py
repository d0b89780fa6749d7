"""Climbing the ladder: what the compiler, the simulator and, where there is one, the GPU say of each rung."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from flashwright.compiler import Kernel, compile_many
from flashwright.gpu import gpu_available
from flashwright.kernel_configs import DType, FlashForwardKernelConfig, LadderRung, get_kernel_progression
from flashwright.occupancy import occupancy
from flashwright.progress import progress_bar
from flashwright.simulation import random_inputs, reference_forward, relative_error, simulate_forward

ARCHITECTURES = ("sm_80", "sm_90")
SIMULATED_ROWS = 256
SIMULATED_HEADS = 2
TIMED_SHAPE = {"batch": 4, "heads": 16, "rows": 4096}
"""16k tokens of hidden size 2048 at d_head 128."""
TOLERANCE = {DType.FP16: 1e-3, DType.BF16: 8e-3}
"""Largest relative error that rounding to the dtype explains."""


@dataclass(frozen=True)
class Compiled:
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    limited_by: str

    @classmethod
    def of(cls, kernel: Kernel) -> Compiled:
        resident = occupancy(kernel, kernel.arch)
        return cls(
            kernel.registers, kernel.spill_bytes, kernel.shared_bytes, resident.blocks_per_sm, resident.limited_by
        )


@dataclass(frozen=True)
class Simulated:
    instructions: int
    """Executed warp instructions of the whole launch."""
    instructions_per_kv_step: float
    """Of one warp, the start and end of the kernel included."""
    bank_conflicts: int
    global_sectors: int
    relative_error: float


@dataclass(frozen=True)
class Timed:
    time_ms: float
    tflops: float
    ratio_to_flash_attention_2: float


@dataclass(frozen=True)
class RungResult:
    rung: LadderRung
    compiled: dict[str, Compiled]
    simulation: Simulated
    gpu: Timed | None

    @property
    def correct(self) -> bool:
        return self.simulation.relative_error <= TOLERANCE[self.rung.config.dtype]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rung": self.rung.number,
            "config": self.rung.config.short_form(),
            "change": self.rung.change,
            "compiled": {arch: asdict(compiled) for arch, compiled in self.compiled.items()},
            "simulation": asdict(self.simulation),
            "gpu": None if self.gpu is None else asdict(self.gpu),
        }


def climb(dtype: DType | str = DType.BF16, d_head: int = 128, *, progress: bool = True) -> list[RungResult]:
    """Compiles, simulates and, on a GPU, times every rung."""
    rungs = get_kernel_progression(dtype, d_head)
    configs = [rung.config for rung in rungs]
    kernels = {arch: compile_many(configs, arch, progress=progress) for arch in ARCHITECTURES}
    with progress_bar("simulating", len(rungs), enabled=progress) as advance:
        simulations = []
        for config in configs:
            simulations.append(_simulate(config))
            advance()
    timings = _time_all(configs, progress=progress) if gpu_available() else [None] * len(rungs)
    return [
        RungResult(rung, {arch: Compiled.of(kernels[arch][i]) for arch in ARCHITECTURES}, simulations[i], timings[i])
        for i, rung in enumerate(rungs)
    ]


def _simulate(config: FlashForwardKernelConfig) -> Simulated:
    inputs = random_inputs(config, heads=SIMULATED_HEADS, rows=SIMULATED_ROWS)
    simulation = simulate_forward(config, *inputs)
    counters = simulation.run.counters
    warps = SIMULATED_ROWS // config.B_r * SIMULATED_HEADS * config.n_warps
    return Simulated(
        instructions=counters.executed,
        instructions_per_kv_step=counters.executed / (warps * (SIMULATED_ROWS // config.B_c)),
        bank_conflicts=counters.bank_conflicts,
        global_sectors=counters.global_sectors,
        relative_error=relative_error(simulation.output, reference_forward(*inputs)[0]),
    )


def _time_all(configs: list[FlashForwardKernelConfig], *, progress: bool) -> list[Timed]:
    import torch

    from flashwright.bench.peers import flash_attention_2
    from flashwright.bench.timing import forward_flops, gpu_times_ms
    from flashwright.runtime import run_forward

    first = configs[0]
    batch, heads, rows = TIMED_SHAPE.values()
    dtype = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[first.dtype]
    q, k, v = (
        torch.randn(batch, rows, heads, first.d_head, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(3)
    )
    flops = forward_flops(batch, heads, rows, rows, first.d_head)
    out = torch.empty_like(q)
    candidates: dict[Any, Callable[[], Any]] = {"peer": partial(flash_attention_2, q, k, v)}
    candidates |= {config: partial(run_forward, config, q, k, v, out=out) for config in configs}
    with progress_bar("timing", 1, enabled=progress) as advance:
        times = gpu_times_ms(candidates)
        advance()
    return [Timed(times[c], flops / times[c] / 1e9, times["peer"] / times[c]) for c in configs]
