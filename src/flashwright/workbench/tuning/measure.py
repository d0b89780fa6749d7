"""Whether a kernel is right and how long it takes, on a GPU; and what a search needs to know of that GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any, Protocol

from flashwright.choice.problem import TuningProblem
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import KernelConfig
from flashwright.problem.flops import BACKWARD, DECODE, FORWARD
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.decode_plans import CacheTensors
from flashwright.runtime.devices import GPUError, gpu_available, gpu_model
from flashwright.workbench.bench.accuracy import gradient_error, largest
from flashwright.workbench.bench.gpu_machine import torch_dtype
from flashwright.workbench.bench.peers import Inputs
from flashwright.workbench.bench.results import geometric_mean
from flashwright.workbench.bench.scores import NORMAL, score_inputs
from flashwright.workbench.bench.timing import CapturedCall, capture, replay_times_ms
from flashwright.workbench.kernel_calls import ConfigCall, cached_decodes, kernel_calls
from flashwright.workbench.tuning.candidates import check_problems

TUNING_SCORES = (NORMAL, "normal-x4", "rising-slow", "falling-fast")
"""Kinds of scores that a config must be fast on unless others are given: maxima that stay, maxima that grow, in either
order of visiting keys, and maxima that outgrow every reference in one of them."""
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
            self._check = cache(partial(CHECKS[problem.operation], device=device))
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
    """A small problem with its inputs and its result by definition."""

    problem: TuningProblem
    inputs: tuple[Any, Any, Any]
    expected: Any

    @classmethod
    def of(cls, problem: TuningProblem, scores: str = NORMAL, *, device: str) -> Check:
        from flashwright.runtime.reference import attention_reference

        q, k, v = _guarded_inputs(problem, scores, device)
        expected, _ = attention_reference(q.double(), k.double(), v.double(), options=AttentionOptions(problem.window))
        return cls(problem, (q, k, v), expected)

    def error(self, config: KernelConfig) -> float:
        """Relative, in the Frobenius norm; infinite if an element was not written or another one was."""
        from flashwright.runtime.forward import run_forward

        problem = self.problem
        out = _guarded(problem, problem.heads, problem.q_length, self.expected.device)
        if problem.reads_cache:
            call = cached_decodes(*self.inputs, CacheTensors(), window=problem.window, out=out)(config)
        else:
            call = partial(run_forward, config, *self.inputs, window=problem.window, out=out)
        _launch(call, config, problem)
        behind = out._base[:, self.problem.q_length :]
        written = out[..., : self.expected.shape[-1]].double()
        relative = ((written - self.expected).norm() / self.expected.norm()).item()
        return relative if math.isfinite(relative) and behind.isnan().all().item() else math.inf


@dataclass(frozen=True)
class BackwardCheck:
    """A small problem with its inputs, and the gradient of its output."""

    problem: TuningProblem
    inputs: tuple[Any, Any, Any]
    do: Any

    @classmethod
    def of(cls, problem: TuningProblem, scores: str = NORMAL, *, device: str) -> BackwardCheck:
        inputs = _guarded_inputs(problem, scores, device)
        return cls(problem, inputs, _guarded(problem, problem.heads, problem.q_length, device).normal_())

    def error(self, config: KernelConfig) -> float:
        """The largest of any gradient in any head; infinite or NaN if one is unusable."""
        run = kernel_calls(BACKWARD, *self.inputs, self.do, window=self.problem.window)(config)
        gradients = _launch(run, config, self.problem)
        heads = product(range(self.problem.batch), range(self.problem.heads))
        return largest([self._error_of_head(gradients, slice(b, b + 1), slice(h, h + 1)) for b, h in heads])

    def _error_of_head(self, gradients: tuple[Any, Any, Any], batch: slice, head: slice) -> float:
        (q, k, v, do), (dq, dk, dv) = (
            [x[batch, head] for x in tensors] for tensors in ((*self.inputs, self.do), gradients)
        )
        return gradient_error((dq, dk, dv), Inputs(q, k, v, self.problem.causal, BACKWARD, do))


CHECKS: dict[str, Callable[..., Check | BackwardCheck]] = {
    FORWARD: Check.of,
    BACKWARD: BackwardCheck.of,
    DECODE: Check.of,
}
"""By operation."""


def _launch(call: Callable[[], Any], config: KernelConfig, problem: TuningProblem) -> Any:
    import torch

    try:
        result = call()
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise KernelCrash(f"{config} failed on {problem}: {error}") from error
    return result


def _guarded_inputs(problem: TuningProblem, scores: str, device: str) -> tuple[Any, Any, Any]:
    of_kv = (problem.heads_of_kv, problem.kv_length)
    q, k, v = (
        _guarded(problem, heads, rows, device) for heads, rows in ((problem.heads, problem.q_length), of_kv, of_kv)
    )
    for x, values in zip((q, k, v), _random(problem, scores, device), strict=True):
        x.copy_(values)
    return q, k, k[..., : problem.values_in_keys] if problem.values_in_keys else v


def _random(problem: TuningProblem, scores: str, device: str) -> tuple[Any, Any, Any]:
    return score_inputs(
        scores,
        batch=problem.batch,
        heads=problem.heads,
        kv_heads=problem.heads_of_kv,
        q_length=problem.q_length,
        kv_length=problem.kv_length,
        d_head=problem.d_head,
        dtype=torch_dtype(problem.dtype),
        device=device,
    )


def _guarded(problem: TuningProblem, heads: int, rows: int, device: Any) -> Any:
    """NaNs of a tensor's shape, in front of rows that are not part of it."""
    import torch

    shape = (problem.batch, rows + GUARD_ROWS, heads, problem.d_head)
    whole = torch.full(shape, math.nan, dtype=torch_dtype(problem.dtype), device=device)
    return whole[:, :rows].transpose(1, 2)
