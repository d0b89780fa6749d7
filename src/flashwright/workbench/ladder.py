"""Climbing the ladder: what the compiler, the simulator and, where there is one, the GPU report of each rung."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.compiler.occupancy import occupancy
from flashwright.kernels.family import FamilyLadder, KernelConfig, KernelFamily
from flashwright.kernels.ladder import LadderRung
from flashwright.kernels.registry import families, family_named, family_of, parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import FORWARD, OPERATIONS, operation_flops
from flashwright.problem.options import AttentionOptions
from flashwright.problem.reference import TOLERANCE
from flashwright.runtime.compiling import compile_many
from flashwright.runtime.devices import gpu_available
from flashwright.runtime.progress import progress_bar
from flashwright.simulation.config import simulate_config
from flashwright.workbench.bench.result_files import parsed_entries, read_document, write_document
from flashwright.workbench.environment import environment_record
from flashwright.workbench.kernel_calls import kernel_calls
from flashwright.workbench.sample import PLAIN_SAMPLE, Sample, kv_steps

SIMULATED_ROWS = 256
SIMULATED_HEADS = 2
USUAL_D_HEAD = 128
CAUSAL_SAMPLE = Sample(AttentionOptions.of(causal=True))
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
    sample: Sample = PLAIN_SAMPLE
    """What every rung was compiled for and simulated on."""

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
        if family is families()[0]:
            name = "The ladder"
        else:
            operation = "" if family.operation.name == FORWARD else f" {family.operation.name}"
            name = f"The {family.title}{operation} ladder"
        return f"{name}: {self.sample}" if str(self.sample) else name

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
        return {
            "environment": dict(self.environment),
            "timed_shape": TIMED_SHAPE,
            "sample": self.sample.to_dict(),
            "rungs": rungs,
        }


def write_ladder(path: Path, ladder: Ladder) -> None:
    write_document(path, ladder.to_dict())


def read_ladder(path: Path) -> Ladder:
    document = read_document(path, holding="rungs", made_by="flashwright ladder")
    rungs = parsed_entries(path, document, "rungs", RungResult.from_dict)
    sample = Sample.from_dict(document["sample"]) if "sample" in document else PLAIN_SAMPLE
    return Ladder(tuple(rungs), document.get("environment", {}), sample)


def climbable_families(operation: str = FORWARD) -> tuple[str, ...]:
    """The families of an operation that have a ladder."""
    return tuple(family.name for family in families(operation) if family.ladder is not None)


def climbable_operations() -> tuple[str, ...]:
    return tuple(operation for operation in OPERATIONS if climbable_families(operation))


def ladder_of(family: str, operation: str = FORWARD) -> FamilyLadder:
    """How a family is climbed; raises `ValueError` for one without a ladder."""
    found = family_named(family, operation).ladder
    if found is None:
        raise ValueError(f"family: {family!r} has no ladder; allowed: {', '.join(climbable_families(operation))}")
    return found


def climb(
    dtype: DType | str = DType.BF16,
    d_head: int | None = None,
    *,
    family: str | None = None,
    operation: str = FORWARD,
    sample: Sample = PLAIN_SAMPLE,
    progress: bool = True,
) -> Ladder:
    """Compiles, simulates and, on a GPU of the family, times every rung.

    Rungs are timed under a full or a causal mask, which the peers compute too; other samples are simulated alone.

    The first family and a head dimension of 128, or the largest of a family without, unless others are given.
    """
    if operation not in climbable_operations():
        raise ValueError(f"operation: {operation!r} has no ladder; allowed: {', '.join(climbable_operations())}")
    family = climbable_families(operation)[0] if family is None else family
    ladder = ladder_of(family, operation)
    described = family_named(family, operation)
    rungs = ladder.rungs(dtype, _usual_d_head(described) if d_head is None else d_head)
    configs = [rung.config for rung in rungs]
    variant = sample.variant(configs[0])
    kernels = {arch: compile_many(configs, arch, variant, progress=progress) for arch in ladder.architectures}
    with progress_bar("simulating", len(rungs), enabled=progress) as advance:
        simulations = []
        for config in configs:
            simulations.append(_simulate(config, sample))
            advance()
    timed = sample in (PLAIN_SAMPLE, CAUSAL_SAMPLE) and gpu_available() and described.runs_on(_this_arch())
    timings = _time_all(configs, ladder.peers, sample, progress=progress) if timed else [None] * len(rungs)
    results = [
        RungResult(
            rung, {arch: Compiled.of(kernels[arch][i]) for arch in ladder.architectures}, simulations[i], timings[i]
        )
        for i, rung in enumerate(rungs)
    ]
    return Ladder(tuple(results), environment_record(), sample)


def _usual_d_head(family: KernelFamily) -> int:
    d_heads = family.d_heads
    return USUAL_D_HEAD if USUAL_D_HEAD in d_heads else d_heads[-1]


def _simulate(config: KernelConfig, sample: Sample) -> Simulated:
    heads, kv_heads = sample.head_counts(SIMULATED_HEADS)
    keys = SIMULATED_ROWS if sample.keys is None else sample.keys
    options = sample.options
    simulation = simulate_config(
        config, heads=heads, rows=SIMULATED_ROWS, kv_heads=kv_heads, keys=keys, options=options
    )
    counters = simulation.run.counters
    steps_of_warps = config.n_warps * heads * kv_steps(config, options, SIMULATED_ROWS, keys)
    return Simulated(
        instructions=counters.executed,
        instructions_per_kv_step=counters.executed / steps_of_warps,
        bank_conflicts=counters.bank_conflicts,
        global_sectors=counters.global_sectors,
        relative_error=simulation.relative_error,
    )


def _this_arch() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _time_all(configs: list[KernelConfig], peers: tuple[str, ...], sample: Sample, *, progress: bool) -> list[Timed]:
    import torch

    from flashwright.workbench.bench.peers import PEERS, Inputs
    from flashwright.workbench.bench.timing import gpu_times_ms
    from flashwright.workbench.bench.training import prepare_operation, with_gradients

    first = configs[0]
    operation = family_of(first).operation.name
    batch, heads, rows = TIMED_SHAPE.values()
    dtype = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[first.dtype]
    q, k, v = (
        torch.randn(batch, rows, heads, first.d_head, dtype=dtype, device="cuda").transpose(1, 2) for _ in range(3)
    )
    causal = sample == CAUSAL_SAMPLE
    flops = operation_flops(operation, batch, heads, rows, rows, first.d_head) / (2 if causal else 1)
    inputs = Inputs(q, k, v, causal=causal)
    if operation != FORWARD:
        inputs = with_gradients(inputs, operation)
    candidates: dict[Any, Callable[[], Any]] = {
        name: prepare_operation(PEERS[name].prepare, inputs).run for name in peers
    }
    run = kernel_calls(operation, q, k, v, inputs.do, window=sample.options.window)
    candidates |= {config: run(config) for config in configs}
    with progress_bar("timing", 1, enabled=progress) as advance:
        times = gpu_times_ms(candidates)
        advance()
    return [Timed(times[c], flops / times[c] / 1e9, {name: times[name] / times[c] for name in peers}) for c in configs]
