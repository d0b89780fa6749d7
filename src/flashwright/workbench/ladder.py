"""Climbing the ladder: what the compiler, the simulator and, where there is one, the GPU report of each rung."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.compiler.occupancy import occupancy
from flashwright.kernels.family import FamilyLadder, KernelConfig
from flashwright.kernels.ladder import LadderRung
from flashwright.kernels.registry import families, family_named, family_of, parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.reference import TOLERANCE, random_inputs, reference_forward, relative_error
from flashwright.runtime.compiling import compile_many
from flashwright.runtime.devices import gpu_available
from flashwright.runtime.progress import progress_bar
from flashwright.runtime.simulated import simulate_forward
from flashwright.workbench.bench.result_files import parsed_entries, read_document, write_document
from flashwright.workbench.environment import environment_record

SIMULATED_ROWS = 256
SIMULATED_HEADS = 2
USUAL_D_HEAD = 128
TIMED_SHAPE = {"batch": 4, "heads": 16, "rows": 4096}
"""16k tokens of hidden size 2048 at d_head 128."""


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
    ratios: Mapping[str, float]
    """How many times as fast as each peer, by the names of `bench.peers`."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timed:
        if "ratio_to_flash_attention_2" in values:  # as it was stored when that was the only peer
            ratios = {"sdpa-fa2": values["ratio_to_flash_attention_2"]}
        else:
            ratios = dict(values["ratios"])
        return cls(values["time_ms"], values["tflops"], ratios)


@dataclass(frozen=True)
class RungResult:
    rung: LadderRung[Any]
    compiled: dict[str, Compiled]
    simulation: Simulated
    gpu: Timed | None

    @property
    def instructions_per_thousand_scores(self) -> float:
        """Of one warp, the start and end of the kernel included; comparable between blocks of any size."""
        config = self.rung.config
        return 1000 * self.simulation.instructions_per_kv_step * config.n_warps / (config.B_r * config.B_c)

    @property
    def correct(self) -> bool:
        return self.simulation.relative_error <= TOLERANCE[self.rung.config.dtype]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rung": self.rung.number,
            "config": self.rung.config.short_form(),
            "change": self.rung.change,
            "compiled": {arch: asdict(compiled) for arch, compiled in self.compiled.items()},
            "simulation": {
                **asdict(self.simulation),
                "instructions_per_thousand_scores": self.instructions_per_thousand_scores,
            },
            "gpu": None if self.gpu is None else asdict(self.gpu),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RungResult:
        gpu = values["gpu"]
        return cls(
            LadderRung(int(values["rung"]), str(values["change"]), parse_config(values["config"])),
            {arch: Compiled(**facts) for arch, facts in values["compiled"].items()},
            Simulated(**{field.name: values["simulation"][field.name] for field in fields(Simulated)}),
            None if gpu is None else Timed.from_dict(gpu),
        )


@dataclass(frozen=True)
class Ladder:
    """Every rung, from the plainest kernel to the fastest, and where that was found."""

    rungs: tuple[RungResult, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def timed(self) -> bool:
        """Whether a GPU timed every rung."""
        return all(result.gpu is not None for result in self.rungs)

    @property
    def timings(self) -> list[Timed]:
        """Of the rungs that a GPU timed."""
        return [result.gpu for result in self.rungs if result.gpu is not None]

    @property
    def title(self) -> str:
        """With the family's name, unless it is the one whose short forms have none."""
        family = family_of(self.rungs[0].rung.config)
        return "The ladder" if family is families()[0] else f"The {family.title} ladder"

    @property
    def peers(self) -> list[str]:
        """What every timed rung was timed beside; what the family has to reach first."""
        return list(self.timings[0].ratios) if self.timings else []

    @property
    def gains(self) -> list[float | None]:
        """How many times as fast as the rung before each timed rung is; None for the first."""
        times = [timed.time_ms for timed in self.timings]
        return [None, *(before / after for before, after in pairwise(times))][: len(times)]

    @property
    def wrong(self) -> list[int]:
        """The rungs that do not agree with the float64 reference."""
        return [result.rung.number for result in self.rungs if not result.correct]

    def to_dict(self) -> dict[str, Any]:
        rungs = [result.to_dict() for result in self.rungs]
        if self.timed:
            for rung, gain in zip(rungs, self.gains, strict=True):
                rung["gain_over_previous"] = gain
        return {"environment": dict(self.environment), "timed_shape": TIMED_SHAPE, "rungs": rungs}


def write_ladder(path: Path, ladder: Ladder) -> None:
    write_document(path, ladder.to_dict())


def read_ladder(path: Path) -> Ladder:
    document = read_document(path, holding="rungs", made_by="flashwright ladder")
    rungs = parsed_entries(path, document, "rungs", RungResult.from_dict)
    return Ladder(tuple(rungs), document.get("environment", {}))


def climbable_families() -> tuple[str, ...]:
    """The families that have a ladder."""
    return tuple(family.name for family in families() if family.ladder is not None)


def ladder_of(family: str) -> FamilyLadder:
    """How a family is climbed; raises `ValueError` for one without a ladder."""
    found = family_named(family).ladder
    if found is None:
        raise ValueError(f"family: {family!r} has no ladder; allowed: {', '.join(climbable_families())}")
    return found


def climb(
    dtype: DType | str = DType.BF16,
    d_head: int | None = None,
    *,
    family: str | None = None,
    progress: bool = True,
) -> Ladder:
    """Compiles, simulates and, on a GPU of the family, times every rung.

    The first family and a head dimension of 128, or the largest of a family without, unless others are given.
    """
    family = climbable_families()[0] if family is None else family
    ladder = ladder_of(family)
    rungs = ladder.rungs(dtype, _usual_d_head(family) if d_head is None else d_head)
    configs = [rung.config for rung in rungs]
    kernels = {arch: compile_many(configs, arch, progress=progress) for arch in ladder.architectures}
    with progress_bar("simulating", len(rungs), enabled=progress) as advance:
        simulations = []
        for config in configs:
            simulations.append(_simulate(config))
            advance()
    timed = gpu_available() and family_named(family).runs_on(_this_arch())
    timings = _time_all(configs, ladder.peers, progress=progress) if timed else [None] * len(rungs)
    results = [
        RungResult(
            rung, {arch: Compiled.of(kernels[arch][i]) for arch in ladder.architectures}, simulations[i], timings[i]
        )
        for i, rung in enumerate(rungs)
    ]
    return Ladder(tuple(results), environment_record())


def _usual_d_head(family: str) -> int:
    d_heads = family_named(family).d_heads
    return USUAL_D_HEAD if USUAL_D_HEAD in d_heads else d_heads[-1]


def _simulate(config: KernelConfig) -> Simulated:
    inputs = random_inputs(config, heads=SIMULATED_HEADS, rows=SIMULATED_ROWS)
    simulation = simulate_forward(config, *inputs)
    counters = simulation.run.counters
    q_blocks, kv_blocks = -(-SIMULATED_ROWS // config.B_r), -(-SIMULATED_ROWS // config.B_c)
    warps = q_blocks * SIMULATED_HEADS * config.n_warps
    return Simulated(
        instructions=counters.executed,
        instructions_per_kv_step=counters.executed / (warps * kv_blocks),
        bank_conflicts=counters.bank_conflicts,
        global_sectors=counters.global_sectors,
        relative_error=relative_error(simulation.output, reference_forward(*inputs)[0]),
    )


def _this_arch() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _time_all(configs: list[KernelConfig], peers: tuple[str, ...], *, progress: bool) -> list[Timed]:
    import torch

    from flashwright.problem.flops import forward_flops
    from flashwright.runtime.forward import run_forward
    from flashwright.workbench.bench.peers import PEERS, Inputs
    from flashwright.workbench.bench.timing import gpu_times_ms

    first = configs[0]
    batch, heads, rows = TIMED_SHAPE.values()
    dtype = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[first.dtype]
    q, k, v = (
        torch.randn(batch, rows, heads, first.d_head, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(3)
    )
    flops = forward_flops(batch, heads, rows, rows, first.d_head)
    out = torch.empty_like(q)
    candidates: dict[Any, Callable[[], Any]] = {
        name: PEERS[name].prepare(Inputs(q, k, v, causal=False)).run for name in peers
    }
    candidates |= {config: partial(run_forward, config, q, k, v, out=out) for config in configs}
    with progress_bar("timing", 1, enabled=progress) as advance:
        times = gpu_times_ms(candidates)
        advance()
    return [Timed(times[c], flops / times[c] / 1e9, {name: times[name] / times[c] for name in peers}) for c in configs]
