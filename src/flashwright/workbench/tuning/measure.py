"""Whether a kernel is right and how long it takes, on a GPU; and what a search needs to know of that GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

from flashwright.choice.problem import TuningProblem
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import KernelConfig
from flashwright.problem.flops import FORWARD
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.devices import GPUError, gpu_available, gpu_model
from flashwright.workbench.bench.gpu_machine import torch_dtype
from flashwright.workbench.bench.results import geometric_mean
from flashwright.workbench.bench.scores import NORMAL, score_inputs
from flashwright.workbench.bench.timing import CapturedCall, capture, replay_times_ms
from flashwright.workbench.kernel_calls import ConfigCall, kernel_calls
from flashwright.workbench.tuning.candidates import check_problems

TUNING_SCORES = (NORMAL, "normal-x4", "rising-slow", "falling-slow")
"""Kinds of scores that a config must be fast on unless others are given: maxima that stay, and maxima that grow, in
either order of visiting keys."""
ROUNDS_PER_SWEEP = 3
GUARD_ROWS = 64
"""Rows of NaN behind every tensor of a check: reading them spoils the result, and writing them shows."""


class KernelCrash(GPUError):
    """A kernel brought the GPU's context down, so that this process cannot use it any more."""


class Measurer(Protocol):
    """What a search needs of a GPU: errors and times of the kernels for one problem."""

    def error(self, config: KernelConfig) -> float:
        """The largest relative error over check problems and kinds of scores; infinite or NaN if one is unusable."""
        ...

    def sweep(self, configs: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
        """Milliseconds of one launch of each, all measured in turns; the geometric mean over the kinds of scores."""
        ...


class Machine(Protocol):
    """A GPU to tune for."""

    @property
    def gpu(self) -> GPUModel: ...
    @property
    def shared_bytes_per_block(self) -> int: ...
    def measurer(self, problem: TuningProblem, scores: Sequence[str]) -> Measurer: ...


@dataclass(frozen=True)
class TorchMachine:
    """PyTorch's current GPU."""

    gpu: GPUModel
    shared_bytes_per_block: int

    def measurer(self, problem: TuningProblem, scores: Sequence[str]) -> Measurer:
        return GpuMeasurer(problem, scores)


def this_machine() -> TorchMachine | None:
    """The GPU that `attention()` would use; None if there is none."""
    if not gpu_available():
        return None
    import torch

    index = torch.cuda.current_device()
    most = torch.cuda.get_device_properties(index).shared_memory_per_block_optin
    return TorchMachine(gpu_model(index), most)


class GpuMeasurer:
    """Runs kernels on random inputs with scores of some kinds on the current GPU."""

    def __init__(self, problem: TuningProblem, scores: Sequence[str] = TUNING_SCORES, device: str = "cuda") -> None:
        import torch

        self._problem, self._scores = problem, tuple(scores)
        try:
            self._check = cache(partial(Check.of, device=device))
            self._inputs = {kind: _random(problem, kind, device) for kind in self._scores}
        except torch.OutOfMemoryError as error:
            raise GPUError(f"the GPU has no memory left for {problem}; choose a smaller one") from error
        self._stream = torch.cuda.Stream()
        self._calls: dict[str, ConfigCall] = {}
        self._captured: dict[tuple[KernelConfig, str], CapturedCall] = {}

    def error(self, config: KernelConfig) -> float:
        problems = check_problems(self._problem, config)
        return max(self._check(small, kind).error(config) for small in problems for kind in self._scores)

    def sweep(self, configs: Sequence[KernelConfig]) -> dict[KernelConfig, float]:
        try:
            wanted = [(config, kind) for config in configs for kind in self._scores]
            for config, kind in wanted:
                if (config, kind) not in self._captured:
                    self._captured[config, kind] = capture(self._call(kind)(config), self._stream, launches=None)
            measured = {each: self._captured[each] for each in wanted}
            times = replay_times_ms(measured, self._stream, rounds=ROUNDS_PER_SWEEP)
        except RuntimeError as error:
            raise GPUError(f"timing {self._problem} failed: {error}") from error
        return {config: mean_over_kinds(times[config, kind] for kind in self._scores) for config in configs}

    def _call(self, kind: str) -> ConfigCall:
        """Of any config, on scores of a kind."""
        if kind not in self._calls:
            q, k, v = self._inputs[kind]
            self._calls[kind] = kernel_calls(
                self._problem.operation, q, k, v, _gradient_like(q), window=self._problem.window
            )
        return self._calls[kind]


def _gradient_like(q: Any) -> Any:
    """Standard normal, with the strides of q."""
    import torch

    return torch.empty_like(q).normal_()


def mean_over_kinds(times_ms: Iterable[float]) -> float:
    """The geometric mean: twice the time on one kind counts as much as twice the time on another."""
    mean = geometric_mean(times_ms)
    assert mean is not None
    return mean


@dataclass(frozen=True)
class Check:
    """A small problem with its inputs and its results by definition."""

    problem: TuningProblem
    inputs: tuple[Any, Any, Any]
    do: Any
    """The gradient of the output, for a backward."""
    expected: tuple[Any, ...]
    """The output, or the gradients of q, k and v."""

    @classmethod
    def of(cls, problem: TuningProblem, scores: str = NORMAL, *, device: str) -> Check:
        from flashwright.runtime.reference import attention_gradients, attention_reference

        q, k, v = (_guarded(problem, rows, device) for rows in (problem.q_length, problem.kv_length, problem.kv_length))
        for x, values in zip((q, k, v), _random(problem, scores, device), strict=True):
            x.copy_(values)
        options, in_float64 = AttentionOptions(problem.window), (q.double(), k.double(), v.double())
        if problem.operation == FORWARD:
            return cls(problem, (q, k, v), None, attention_reference(*in_float64, options=options)[:1])
        do = _guarded(problem, problem.q_length, device).normal_()
        return cls(problem, (q, k, v), do, attention_gradients(do.double(), None, *in_float64, options=options))

    def error(self, config: KernelConfig) -> float:
        """Relative, in the Frobenius norm; infinite if an element was not written or another one was."""
        import torch

        try:
            results = self._results(config)
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise KernelCrash(f"{config} failed on {self.problem}: {error}") from error
        errors = [
            ((result.double() - by_definition).norm() / by_definition.norm()).item()
            for result, by_definition in zip(results, self.expected, strict=True)
        ]
        return max(errors) if all(map(math.isfinite, errors)) else math.inf

    def _results(self, config: KernelConfig) -> tuple[Any, ...]:
        """What the config's kernels compute; NaN if they write behind the output of a forward."""
        from flashwright.runtime.forward import run_forward

        if self.problem.operation == FORWARD:
            out = _guarded(self.problem, self.problem.q_length, self.expected[0].device)
            run_forward(config, *self.inputs, window=self.problem.window, out=out)
            behind = out._base[:, self.problem.q_length :]
            return (out if behind.isnan().all().item() else out * math.nan,)
        gradients: tuple[Any, ...] = kernel_calls(
            self.problem.operation, *self.inputs, self.do, window=self.problem.window
        )(config)()
        return gradients


def _random(problem: TuningProblem, scores: str, device: str) -> tuple[Any, Any, Any]:
    return score_inputs(
        scores,
        batch=problem.batch,
        heads=problem.heads,
        q_length=problem.q_length,
        kv_length=problem.kv_length,
        d_head=problem.d_head,
        dtype=torch_dtype(problem.dtype),
        device=device,
    )


def _guarded(problem: TuningProblem, rows: int, device: Any) -> Any:
    """NaNs of a tensor's shape, in front of rows that are not part of it."""
    import torch

    shape = (problem.batch, rows + GUARD_ROWS, problem.heads, problem.d_head)
    whole = torch.full(shape, math.nan, dtype=torch_dtype(problem.dtype), device=device)
    return whole[:, :rows].transpose(1, 2)
