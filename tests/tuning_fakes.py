"""A GPU that is not there: kernels that were never compiled, with errors and times that a test decides."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashwright import FlashForwardKernelConfig, Kernel
from flashwright.compiler import CompiledProgram
from flashwright.families import family_of
from flashwright.tuning.problem import TuningProblem, problem_of
from flashwright.tuning.results import Timing, TunedResult
from flashwright.tuning.space import enumerate_space

GPU = "NVIDIA Imaginary 9000"
RIGHT, WRONG = 1e-4, 0.5
PROBLEM = problem_of(d_head=64, q_length=512)
SPACE = {"limit": 24}
CONFIGS = enumerate_space(PROBLEM, **SPACE).configs


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
    name: str = GPU
    arch: str = "sm_90"
    shared_bytes_per_block: int = 227 * 1024
    fake: FakeMeasurer = field(default_factory=FakeMeasurer)

    def measurer(self, problem: TuningProblem) -> FakeMeasurer:
        return self.fake


def fake_compiler(spilling: Sequence[FlashForwardKernelConfig] = ()) -> Callable[..., list[Kernel]]:
    """`compile_many` without the compiler."""

    def compile_many(configs: Sequence[Any], arch: str, variant: Any, *, progress: bool = True) -> list[Kernel]:
        kernels = []
        for config in configs:
            shapes, spills = family_of(config).shapes(config), 16 if config in spilling else 0
            program = CompiledProgram("kernel", arch, b"", "", 128, spills, 0, "", False)
            kernels.append(Kernel(config, variant, program, shapes.shared_bytes, shapes.threads, ""))
        return kernels

    return compile_many


def a_result(
    config: FlashForwardKernelConfig = CONFIGS[0],
    time_ms: float = 1.0,
    *,
    gpu: str = GPU,
    problem: TuningProblem = PROBLEM,
    runners_up: Sequence[Timing] = (),
) -> TunedResult:
    versions = {"flashwright": "0.1.0", "nvrtc": "13.0", "torch": None, "driver": "580.1"}
    return TunedResult(gpu, problem, Timing(config, time_ms), tuple(runners_up), "2030-01-02T03:04:05+00:00", versions)
