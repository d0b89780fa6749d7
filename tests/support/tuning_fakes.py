"""A GPU that is not there: kernels that were never compiled, with errors and times that a test decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashwright import FlashForwardKernelConfig, Kernel
from flashwright.choice.choose import untuned_config
from flashwright.choice.problem import TuningProblem, problem_of
from flashwright.choice.results import NORMAL_SCORES, Timing, TunedResult
from flashwright.compiler.nvrtc import CompiledProgram
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import Occasion
from flashwright.kernels.registry import family_named, family_of
from flashwright.workbench.tuning.space import enumerate_space

GPU = "NVIDIA Imaginary 9000"
MODEL = GPUModel.of_architecture(GPU, "sm_80")
RIGHT, WRONG = 1e-4, 0.5
PROBLEM = problem_of(d_head=64, q_length=512)
SPACE = {"limit": 24}
CONFIGS = enumerate_space(PROBLEM, **SPACE).configs


def occasion_of(problem: TuningProblem, gpu: GPUModel | None = MODEL) -> Occasion:
    kind = problem.kind
    return Occasion(kind.dtype, kind.d_head, kind.causal, kind.q_bucket, kind.kv_bucket, gpu)


def untuned(problem: TuningProblem = PROBLEM, gpu: GPUModel | None = MODEL) -> Any:
    """What a family's rules of experience choose for a problem."""
    return untuned_config(family_named(problem.family), occasion_of(problem, gpu))


@dataclass
class FakeMeasurer:
    """Times that grow with a config's place in `ranking`, give or take some noise; remembers all that it was asked."""

    ranking: Sequence[FlashForwardKernelConfig] = CONFIGS
    errors: dict[FlashForwardKernelConfig, float] = field(default_factory=dict)
    noise: float = 0.0
    before_sweep: Callable[[int], None] = lambda number: None
    checked: list[FlashForwardKernelConfig] = field(default_factory=list)
    swept: list[tuple[FlashForwardKernelConfig, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(0)

    def error(self, config: FlashForwardKernelConfig) -> float:
        self.checked.append(config)
        return self.errors.get(config, RIGHT)

    def sweep(self, configs: Sequence[FlashForwardKernelConfig]) -> dict[FlashForwardKernelConfig, float]:
        self.before_sweep(len(self.swept))
        self.swept.append(tuple(configs))
        return {config: self.time_ms(config) * (1 + self._random.gauss(0, self.noise)) for config in configs}

    def time_ms(self, config: FlashForwardKernelConfig) -> float:
        """Those that were not ranked are as slow as the last."""
        place = self.ranking.index(config) if config in self.ranking else len(self.ranking) - 1
        return 1 + place / len(self.ranking)


@dataclass
class FakeMachine:
    gpu: GPUModel = MODEL
    shared_bytes_per_block: int = 227 * 1024
    fake: FakeMeasurer = field(default_factory=FakeMeasurer)

    def measurer(self, problem: TuningProblem, scores: Sequence[str]) -> FakeMeasurer:
        self.scores = tuple(scores)
        return self.fake


def fake_compiler(spilling: Sequence[FlashForwardKernelConfig] = ()) -> Callable[..., list[Kernel]]:
    """`compile_all` without the compiler."""

    def compile_all(wanted: Sequence[tuple[Any, Any]], arch: str, *, progress: bool = True) -> list[Kernel]:
        kernels = []
        for config, variant in wanted:
            shapes, spills = family_of(config).shapes(config), 16 if config in spilling else 0
            program = CompiledProgram("kernel", arch, b"", "", 128, spills, 0, "", False)
            kernels.append(Kernel(config, variant, program, shapes.shared_bytes, shapes.threads, ""))
        return kernels

    return compile_all


def a_result(
    config: FlashForwardKernelConfig = CONFIGS[0],
    time_ms: float = 1.0,
    *,
    gpu: str = GPU,
    problem: TuningProblem = PROBLEM,
    runners_up: Sequence[Timing] = (),
    date: str = "2030-01-02T03:04:05+00:00",
    kernels: str | None = None,
    scores: Sequence[str] = NORMAL_SCORES,
) -> TunedResult:
    """A result whose kernels' digest is `kernels`; None: it carries none."""
    versions = {"flashwright": "0.1.0", "nvrtc": "13.0", "torch": None, "driver": "580.1"}
    versions |= {} if kernels is None else {"kernels": kernels}
    return TunedResult(gpu, problem, Timing(config, time_ms), tuple(runners_up), date, versions, tuple(scores))
