"""Climbing the ladder: what the compiler, the simulator and, where there is one, the GPU report of each rung."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.compiler.occupancy import occupancy
from flashwright.kernels.cache_use import CacheUse
from flashwright.kernels.family import FamilyLadder, KernelConfig, KernelFamily
from flashwright.kernels.ladder import LadderRung, RungProblem
from flashwright.kernels.registry import families, family_named, family_of, parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.flops import BACKWARD, FORWARD, OPERATIONS, cache_bytes, operation_flops
from flashwright.problem.options import AttentionOptions
from flashwright.problem.reference import TOLERANCE
from flashwright.problem.variant import AttentionVariant
from flashwright.runtime.compiling import compile_all
from flashwright.runtime.devices import gpu_available
from flashwright.runtime.progress import progress_bar
from flashwright.simulation.config import simulate_config
from flashwright.workbench.bench.result_files import parsed_entries, read_document, write_document
from flashwright.workbench.environment import environment_record
from flashwright.workbench.kernel_calls import kernel_calls
from flashwright.workbench.sample import PLAIN_SAMPLE, Sample, kv_steps

USUAL_D_HEAD = 128
CAUSAL_SAMPLE = Sample(AttentionOptions.of(causal=True))


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
    scores: int
    """What the whole launch computes, in whole tiles; of a cache, those that rows attend with."""

    @property
    def instructions_per_thousand_scores(self) -> float:
        """Of one warp, the start and end of the kernel included; comparable between blocks of any size."""
        return 1000 * self.instructions / self.scores

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], config: KernelConfig) -> Simulated:
        known: dict[str, Any] = {field.name: values.get(field.name) for field in fields(cls)}
        if known["scores"] is None:  # as it was stored when all that was simulated were whole tiles
            steps_of_warps = known["instructions"] / known["instructions_per_kv_step"]
            known["scores"] = round(steps_of_warps / config.n_warps * config.B_r * config.B_c)
        return cls(**known)


@dataclass(frozen=True)
class Timed:
    time_ms: float
    tflops: float
    ratios: Mapping[str, float]
    """How many times as fast as each peer, by the names of `bench.peers`."""
    tbps: float | None = None
    """TB/s of keys and values read once, of an operation that reads a cache."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Timed:
        if "ratio_to_flash_attention_2" in values:  # as it was stored when that was the only peer
            ratios = {"sdpa-fa2": values["ratio_to_flash_attention_2"]}
        else:
            ratios = dict(values["ratios"])
        return cls(values["time_ms"], values["tflops"], ratios, values.get("tbps"))


@dataclass(frozen=True)
class RungResult:
    rung: LadderRung[Any]
    compiled: dict[str, Compiled]
    simulation: Simulated
    gpu: Timed | None

    @property
    def instructions_per_thousand_scores(self) -> float:
        return self.simulation.instructions_per_thousand_scores

    @property
    def correct(self) -> bool:
        return self.simulation.relative_error <= TOLERANCE[self.rung.config.dtype]

    def to_dict(self) -> dict[str, Any]:
        use = {} if self.rung.use is None else {"use": asdict(self.rung.use)}
        return {
            "rung": self.rung.number,
            "config": self.rung.config.short_form(),
            "change": self.rung.change,
            **use,
            "compiled": {arch: asdict(compiled) for arch, compiled in self.compiled.items()},
            "simulation": {
                **asdict(self.simulation),
                "instructions_per_thousand_scores": self.instructions_per_thousand_scores,
            },
            "gpu": None if self.gpu is None else asdict(self.gpu),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RungResult:
        gpu, use = values["gpu"], values.get("use")
        use = None if use is None else CacheUse(**use)
        config = parse_config(values["config"])
        return cls(
            LadderRung(int(values["rung"]), str(values["change"]), config, use),
            {arch: Compiled(**facts) for arch, facts in values["compiled"].items()},
            Simulated.from_dict(values["simulation"], config),
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
    def family(self) -> KernelFamily:
        return family_of(self.rungs[0].rung.config)

    @property
    def timed_problem(self) -> RungProblem:
        """What rungs are timed on, by the family's description."""
        return _ladder_of(self.family).timed

    @property
    def simulated_problem(self) -> RungProblem:
        """What rungs are simulated on: the sample's sizes, and the family's where it has none."""
        return sampled(_ladder_of(self.family).simulated, self.sample)

    @property
    def title(self) -> str:
        """With the family's name, unless it is the one whose short forms have none."""
        family = self.family
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
    def unit(self) -> str:
        """Of speeds."""
        return "TB/s" if self.family.operation.reads_cache else "TFLOP/s"

    def speed(self, timed: Timed) -> str:
        return f"{timed.tflops:.0f}" if timed.tbps is None else f"{timed.tbps:.2f}"

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
            "timed_shape": self.timed_problem.to_dict(),
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
    return _ladder_of(family_named(family, operation))


def _ladder_of(family: KernelFamily) -> FamilyLadder:
    if family.ladder is None:
        allowed = ", ".join(climbable_families(family.operation.name))
        raise ValueError(f"family: {family.name!r} has no ladder; allowed: {allowed}")
    return family.ladder


def sampled(usual: RungProblem, sample: Sample) -> RungProblem:
    """The sizes of a sample, and the usual ones where it has none."""
    heads, kv_heads = usual.heads, usual.kv_heads
    if sample.heads is not None or sample.kv_heads is not None:
        heads, kv_heads = sample.head_counts(heads)
    return replace(usual, heads=heads, kv_heads=kv_heads, keys=usual.keys if sample.keys is None else sample.keys)


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
    problem = sampled(ladder.simulated, sample)
    variants = [_variant(rung, sample, problem) for rung in rungs]
    wanted = [(rung.config, variant) for rung, variant in zip(rungs, variants, strict=True)]
    kernels = {arch: compile_all(wanted, arch, progress=progress) for arch in ladder.architectures}
    with progress_bar("simulating", len(rungs), enabled=progress) as advance:
        simulations = []
        for rung in rungs:
            simulations.append(_simulate(rung, problem, sample.options))
            advance()
    timed = sample in (PLAIN_SAMPLE, CAUSAL_SAMPLE) and gpu_available() and described.runs_on(_this_arch())
    timings = _time_all(rungs, ladder, sample, progress=progress) if timed else [None] * len(rungs)
    results = [
        RungResult(
            rung, {arch: Compiled.of(kernels[arch][i]) for arch in ladder.architectures}, simulations[i], timings[i]
        )
        for i, rung in enumerate(rungs)
    ]
    return Ladder(tuple(results), environment_record(), sample)


def _variant(rung: LadderRung[Any], sample: Sample, problem: RungProblem) -> AttentionVariant:
    """What is compiled for a rung."""
    packs = rung.use is None or rung.use.packs_heads
    return sample.variant(rung.config, grouped_heads=packs and problem.heads != problem.kv_heads)


def _usual_d_head(family: KernelFamily) -> int:
    d_heads = family.d_heads
    return USUAL_D_HEAD if USUAL_D_HEAD in d_heads else d_heads[-1]


def _simulate(rung: LadderRung[Any], problem: RungProblem, options: AttentionOptions) -> Simulated:
    config, operation = rung.config, family_of(rung.config).operation
    use = {"use": rung.use} if operation.reads_cache else {}
    heads, rows, keys = problem.heads, problem.rows, problem.keys
    simulation = simulate_config(
        config, heads=heads, rows=rows, kv_heads=problem.kv_heads, keys=keys, options=options, **use
    )
    counters = simulation.run.counters
    tiles_of = heads
    if operation.reads_cache and (rung.use is None or rung.use.packs_heads):
        tiles_of, rows = problem.kv_heads, rows * heads // problem.kv_heads
    steps = tiles_of * kv_steps(config, options, rows, keys)
    return Simulated(
        instructions=counters.executed,
        instructions_per_kv_step=counters.executed / (config.n_warps * steps),
        bank_conflicts=counters.bank_conflicts,
        global_sectors=counters.global_sectors,
        relative_error=simulation.relative_error,
        scores=heads * problem.rows * keys if operation.reads_cache else steps * config.B_r * config.B_c,
    )


def _this_arch() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _time_all(rungs: Sequence[LadderRung[Any]], ladder: FamilyLadder, sample: Sample, *, progress: bool) -> list[Timed]:
    import torch

    from flashwright.workbench.bench.peers import PEERS, Inputs
    from flashwright.workbench.bench.timing import gpu_times_ms
    from flashwright.workbench.bench.training import prepare_operation, with_gradients

    first, problem, peers = rungs[0].config, ladder.timed, ladder.peers
    operation = family_of(first).operation
    dtype = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[first.dtype]

    def some(heads: int, rows: int) -> Any:
        if operation.reads_cache:  # a head's keys one after the other, so that heads can be computed by themselves
            return torch.randn(problem.batch, heads, rows, first.d_head, dtype=dtype, device="cuda")
        return torch.randn(problem.batch, rows, heads, first.d_head, dtype=dtype, device="cuda").transpose(1, 2)

    q, k, v = (
        some(heads, rows) for heads, rows in ((problem.heads, problem.rows), *[(problem.kv_heads, problem.keys)] * 2)
    )
    causal = sample == CAUSAL_SAMPLE
    sizes = (problem.batch, problem.heads, problem.rows, problem.keys, first.d_head)
    flops = operation_flops(operation.name, *sizes) / (2 if causal else 1)
    read = cache_bytes(problem.batch * problem.keys, problem.kv_heads, first.d_head) if operation.reads_cache else None
    inputs = Inputs(q, k, v, causal=causal)
    if operation.name == BACKWARD:
        inputs = with_gradients(inputs, operation.name)
    candidates: dict[Any, Callable[[], Any]] = {
        name: prepare_operation(PEERS[name].prepare, inputs).run for name in peers
    }
    window = sample.options.window
    for rung in rungs:
        run = kernel_calls(operation.name, q, k, v, inputs.do, window=window, use=rung.use)
        candidates[rung.number] = run(rung.config)
    with progress_bar("timing", 1, enabled=progress) as advance:
        times = gpu_times_ms(candidates)
        advance()

    def timed(time_ms: float) -> Timed:
        ratios = {name: times[name] / time_ms for name in peers}
        return Timed(time_ms, flops / time_ms / 1e9, ratios, None if read is None else read / time_ms / 1e9)

    return [timed(times[rung.number]) for rung in rungs]
