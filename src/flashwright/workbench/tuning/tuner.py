"""The whole of tuning one problem: enumerate, compile, check, time, store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashwright.choice.choose import tuned_or_default, untuned_config
from flashwright.choice.currency import DIGEST, kernel_digest
from flashwright.choice.database import TuningDatabase
from flashwright.choice.lookup import shipped_results
from flashwright.choice.problem import TuningProblem
from flashwright.choice.results import Timing, TunedResult
from flashwright.compiler.nvrtc import compiler_build
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import DEFAULT_SPACE, KernelConfig
from flashwright.kernels.registry import family_with_prefix
from flashwright.problem.reference import TOLERANCE
from flashwright.workbench.environment import driver_version, flashwright_version, nvrtc_version_text, package_version
from flashwright.workbench.tuning.candidates import Candidates, compile_candidates
from flashwright.workbench.tuning.journal import SearchJournal, now, space_name
from flashwright.workbench.tuning.measure import TUNING_SCORES, Machine
from flashwright.workbench.tuning.reload import reload
from flashwright.workbench.tuning.search import Stage, Wrong, check_all, halve
from flashwright.workbench.tuning.space import Space, enumerate_space


@dataclass(frozen=True)
class TuningReport:
    """All that came out of tuning one problem."""

    problem: TuningProblem
    scores: tuple[str, ...]
    """The kinds of scores that candidates are checked and timed on."""
    gpu: str | None
    arch: str
    space: Space
    candidates: Candidates | None
    """None if the search was finished before and only its result was requested."""
    wrong: tuple[Wrong, ...]
    stages: tuple[Stage, ...]
    incumbents: tuple[KernelConfig, ...]
    """What would have been used so far, and without the user's own results; the first is in use."""
    result: TunedResult | None
    """None without a GPU."""
    stored: TunedResult | None
    """What is stored for such problems: the result, or a faster one that another process has found meanwhile."""
    resumed: bool
    seconds: float

    @property
    def final_timings(self) -> tuple[Timing, ...]:
        if self.result is None:
            return ()
        return (self.result.best, *self.result.runners_up)

    @property
    def speedup(self) -> float | None:
        """Over what was in use, as measured beside the winner; None if that was not."""
        times = {timing.config: timing.time_ms for timing in self.final_timings}
        before = times.get(self.incumbents[0]) if self.incumbents else None
        return None if before is None or self.result is None else before / self.result.best.time_ms

    def to_dict(self) -> dict[str, Any]:
        return {
            "problem": self.problem.to_dict(),
            "scores": list(self.scores),
            "gpu": self.gpu,
            "arch": self.arch,
            "space": self.space.to_dict(),
            "candidates": None if self.candidates is None else self.candidates.to_dict(),
            "wrong": [{"config": w.config.short_form(), "error": _finite(w.error)} for w in self.wrong],
            "stages": [{"candidates": len(stage.timings), "sweeps": stage.sweeps} for stage in self.stages],
            "incumbents": [config.short_form() for config in self.incumbents],
            "result": None if self.result is None else self.result.to_dict(),
            "speedup": self.speedup,
            "stored": None if self.stored is None else self.stored.to_dict(),
            "resumed": self.resumed,
            "seconds": round(self.seconds, 3),
        }


def _finite(error: float) -> float | None:
    """JSON has no infinity."""
    return error if error < float("inf") else None


def tune(
    problem: TuningProblem,
    machine: Machine | None,
    database: TuningDatabase,
    *,
    scores: Sequence[str] = TUNING_SCORES,
    arch: str = "sm_90",
    space: str = DEFAULT_SPACE,
    quick: bool = False,
    limit: int | None = None,
    resume: bool = False,
    progress: bool = True,
) -> TuningReport:
    """Finds and stores the fastest config for a problem; without a machine, reports what there is to time on `arch`.

    A candidate's time is the geometric mean over kinds of scores.
    """
    began = time.monotonic()
    scores = tuple(scores)
    considered = enumerate_space(problem, name=space, quick=quick, limit=limit)
    if machine is None:
        candidates = compile_candidates(considered.configs, (), problem, arch, progress=progress)
        seconds = time.monotonic() - began
        return TuningReport(problem, scores, None, arch, considered, candidates, (), (), (), None, None, False, seconds)

    reload()  # what is in use may have changed since this process looked
    gpu = machine.gpu
    incumbents = incumbent_configs(problem, gpu)
    journal = SearchJournal.open(database, gpu.name, problem, space_name(considered.configs, scores), resume=resume)
    outcome = _Outcome()
    if journal.result is None:
        outcome = _search(problem, scores, machine, considered, incumbents, journal, progress=progress)
    result = outcome.result or journal.result
    assert result is not None
    stored = journal.finish(result) if outcome.result else database.result(*result.key)
    reload()
    seconds = time.monotonic() - began
    return TuningReport(
        problem, scores, gpu.name, gpu.arch, considered, outcome.candidates, outcome.wrong, outcome.stages, incumbents,
        result, stored, journal.resumed, seconds,
    )  # fmt: skip


@dataclass(frozen=True)
class _Outcome:
    """What a search found; empty if there was nothing left to search."""

    result: TunedResult | None = None
    candidates: Candidates | None = None
    wrong: tuple[Wrong, ...] = ()
    stages: tuple[Stage, ...] = ()


def _search(
    problem: TuningProblem,
    scores: tuple[str, ...],
    machine: Machine,
    space: Space,
    incumbents: tuple[KernelConfig, ...],
    journal: SearchJournal,
    *,
    progress: bool,
) -> _Outcome:
    candidates = compile_candidates(
        space.configs, incumbents, problem, machine.gpu.arch,
        shared_bytes_per_block=machine.shared_bytes_per_block, progress=progress,
    )  # fmt: skip
    configs = [candidate.config for candidate in candidates.survivors]
    measurer = machine.measurer(problem, scores)
    right, wrong = check_all(configs, measurer, journal, progress=progress)
    if not right:
        least = min((each.error for each in wrong), default=float("inf"))
        raise ValueError(
            f"none of {len(configs)} kernels computes {problem}: the smallest error is {least:.2g}, less than "
            f"{TOLERANCE[problem.dtype]:.2g} is allowed; nothing was stored"
        )
    stages = halve(right, incumbents, measurer, journal, progress=progress)
    best, *runners_up = stages[-1].timings
    result = TunedResult(machine.gpu.name, problem, best, tuple(runners_up), now(), _versions(best.config), scores)
    return _Outcome(result, candidates, tuple(wrong), tuple(stages))


def incumbent_configs(problem: TuningProblem, gpu: GPUModel) -> tuple[KernelConfig, ...]:
    """What a search has to beat: what is used now, what would be used without the user's database, and without any."""
    family, occasion = family_with_prefix(problem.family), problem.occasion(gpu)
    now_used = tuned_or_default(family, occasion)
    shipped = [result.config for result in shipped_results() if result.key == (gpu.name, problem.kind)]
    return tuple(dict.fromkeys((now_used, *shipped, untuned_config(family, occasion))))


def _versions(config: KernelConfig) -> dict[str, str | None]:
    return {
        "flashwright": flashwright_version(),
        DIGEST: kernel_digest(config),
        "nvrtc": nvrtc_version_text(),
        "compiler": compiler_build(),
        "torch": package_version("torch"),
        "driver": driver_version(),
    }
