"""Problems for the backward kernels of any family on the simulated GPU, hazards checked, against float64.

The rule is FlashAttention's: a gradient's error is at most twice that of PyTorch's eager attention in the same dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from simulated_cases import Shape, random, random_problem

from flashwright import DType
from flashwright.hardware.architectures import architecture
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.launch import NO_OPTIONS
from flashwright.kernels.registry import family_of, parse_config
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window
from flashwright.runtime.simulated import BackwardSimulation, simulate_backward

TORCH_DTYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}
SUMS_ROUNDING = 1e-5
"""What sums in fp32 may be off by where the eager computation happens to be exact."""
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """What a backward pass is given, apart from what the forward computed."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    dlse: np.ndarray | None = None
    options: AttentionOptions = NO_OPTIONS

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        dtype: DType,
        options: AttentionOptions = NO_OPTIONS,
        *,
        with_dlse: bool = False,
        seed: int = 0,
    ) -> Problem:
        q, k, v = random_problem(Shape(*shape), dtype, seed)
        generator = np.random.default_rng([seed, 1])
        do = random(generator, *q.shape, dtype=dtype)
        dlse = generator.standard_normal(q.shape[:3]).astype(np.float32) if with_dlse else None
        return cls(q, k, v, do, dlse, options)

    def part(self, rows: slice, keys: slice) -> Problem:
        """Of one of several sequences that are packed one after the other."""
        return replace(
            self,
            q=self.q[:, :, rows],
            k=self.k[:, :, keys],
            v=self.v[:, :, keys],
            do=self.do[:, :, rows],
            dlse=None if self.dlse is None else self.dlse[:, :, rows],
        )


class Result(NamedTuple):
    """A forward and its gradients."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    seen: np.ndarray
    """Which keys each row attends to."""

    def rounded(self, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
        """The output and the log-sum-exp as a forward kernel hands them to the backward."""
        return self.out.astype(NUMPY_DTYPES[dtype]), self.lse.astype(np.float32)


def differentiate(problem: Problem, dtype: torch.dtype = torch.float64) -> Result:
    """Eager attention in a dtype, differentiated by PyTorch. Rows without keys have an output of zero."""
    q, k, v = (_tensor(x, dtype).requires_grad_() for x in (problem.q, problem.k, problem.v))
    options, group = problem.options, q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ keys.mT * options.scale_of(q.shape[3])
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    seen = seen_keys(options.window, q.shape[2], k.shape[2])
    empty = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(empty, 0)
    out = torch.softmax(scores, dim=-1).masked_fill(empty, 0) @ values
    lse = torch.logsumexp(scores, dim=-1).masked_fill(empty[:, 0], -torch.inf)
    of_lse = torch.zeros_like(lse) if problem.dlse is None else _tensor(problem.dlse, dtype)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (_tensor(problem.do, dtype), of_lse))
    results = (x.detach().double().numpy() for x in (out, lse, *gradients))
    return Result(*results, seen.numpy())


def seen_keys(window: Window, rows: int, keys: int) -> torch.Tensor:
    position = torch.arange(rows)[:, None] + (keys - rows if window.bottom_right else 0)
    key = torch.arange(keys)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if window.left is not None:
        seen &= key >= position - window.left
    if window.right is not None:
        seen &= key <= position + window.right
    return seen


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float64)).to(dtype)


# --- Checks --------------------------------------------------------------------------------------------------------


def simulated(
    config: KernelConfig | str, problem: Problem, truth: Result | None = None, **how: Any
) -> BackwardSimulation:
    """The backward of a problem, from the forward's output and log-sum-exp."""
    known: Any = parse_config(config) if isinstance(config, str) else config
    out, lse = (truth or differentiate(problem)).rounded(known.dtype)
    return simulate_backward(
        known,
        *(problem.do, problem.q, problem.k, problem.v, out, lse),
        dlse=problem.dlse,
        options=problem.options,
        **{"check_hazards": "stop", "arch": arch_with_room_for(known)} | how,
    )


def arch_with_room_for(config: Any) -> str:
    """The family's oldest architecture, or one whose thread blocks have more shared memory if the config needs it."""
    family = family_of(config)
    oldest = family.oldest_arch
    room = architecture(oldest.removesuffix("a")).shared_bytes_per_block
    return oldest if family.shapes(config).shared_bytes <= room else "sm_90"


def check_backward(config: KernelConfig | str, problem: Problem, **how: Any) -> BackwardSimulation:
    """The gradients are those of attention by definition, and nothing is written beside them."""
    truth = differentiate(problem)
    found = simulated(config, problem, truth, **how)
    check_gradients(problem, found, truth)
    for name in GRADIENTS:
        assert np.all(np.isnan(between(getattr(found, name)))), f"something was written between the rows of {name}"
    return found


def check_gradients(problem: Problem, found: Any, truth: Result | None = None) -> None:
    """Of `found`, an object with dq, dk and dv. What a row or a key without a partner has is exactly zero."""
    truth = truth or differentiate(problem)
    (dtype,) = (member for member, dtype in NUMPY_DTYPES.items() if dtype == problem.q.dtype)
    eager = differentiate(problem, TORCH_DTYPES[dtype])
    for name in GRADIENTS:
        right, actual = getattr(truth, name), getattr(found, name).astype(np.float64)
        error, allowed = largest(actual - right), 2 * largest(getattr(eager, name) - right) + SUMS_ROUNDING
        assert error <= allowed, f"{name}: the error is {error:.2e}, allowed: {allowed:.2e}"
    assert not found.dq[:, :, ~truth.seen.any(1)].astype(bool).any()
    for gradient in (found.dk, found.dv):
        assert not gradient[:, :, ~truth.seen.any(0)].astype(bool).any()


def largest(errors: np.ndarray) -> float:
    """NaN if any is."""
    return float(np.max(np.abs(errors)))


def between(array: np.ndarray) -> np.ndarray:
    """What lies in memory between the elements of an array that has gaps."""
    strides = [stride // array.itemsize for stride in array.strides]
    elements = 1 + sum((count - 1) * stride for count, stride in zip(array.shape, strides, strict=True))
    is_gap = np.ones(elements, bool)
    np.lib.stride_tricks.as_strided(is_gap, array.shape, strides)[...] = False
    return np.lib.stride_tricks.as_strided(array, (elements,), (array.itemsize,))[is_gap]


def with_gaps(array: np.ndarray, fill: float = np.nan) -> np.ndarray:
    """The same values in a larger array: rows, heads and batches have others between them."""
    batch, heads, rows, columns = array.shape
    wide = np.full((batch, heads + 1, rows + 3, columns + 16), fill, array.dtype)
    inner = wide[:, :heads, 2 : rows + 2, 8 : columns + 8]
    inner[...] = array
    return inner


def rows_outermost(array: np.ndarray) -> np.ndarray:
    """The same values with rows before heads in memory."""
    return np.ascontiguousarray(array.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)


# --- Packed sequences ----------------------------------------------------------------------------------------------


def check_packed_backward(
    config: KernelConfig | str,
    lengths: Sequence[tuple[int, int]],
    options: AttentionOptions = NO_OPTIONS,
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int | None = None,
    spoilt: Sequence[int] = (),
    rows_before: int = 0,
    rows_behind: int = 0,
    with_dlse: bool = False,
    seed: int = 0,
    **how: Any,
) -> None:
    """Sequences of (rows, keys) that lie one after the other are differentiated apart: what is NaN or infinite in the
    spoilt ones does not reach the others. Rows and keys of no sequence, before the first and behind the last, have
    gradients of 0."""
    known: Any = parse_config(config) if isinstance(config, str) else config
    q_starts, kv_starts = (np.cumsum([rows_before, *part]).astype(np.int32) for part in zip(*lengths, strict=True))
    counts = (max(1, int(starts[-1]) + rows_behind) for starts in (q_starts, kv_starts))
    shape = (1, *heads, *counts, head_dim or known.d_head)
    problem = Problem.random(shape, known.dtype, options, with_dlse=with_dlse, seed=seed)
    sequences = [
        (slice(*rows), slice(*keys)) for rows, keys in zip(pairwise(q_starts), pairwise(kv_starts), strict=True)
    ]
    out, lse = np.full_like(problem.q, np.nan), np.full(problem.q.shape[:3], np.nan, np.float32)
    for b, (rows, keys) in enumerate(sequences):
        if b in spoilt:
            for array, of, value in ((problem.q, rows, np.nan), (problem.do, rows, np.inf), (problem.k, keys, np.inf)):
                array[:, :, of] = value
            problem.v[:, :, keys] = np.nan
        elif 0 in lengths[b]:
            out[:, :, rows], lse[:, :, rows] = 0, -np.inf
        else:
            out[:, :, rows], lse[:, :, rows] = differentiate(problem.part(rows, keys)).rounded(known.dtype)
    longest = [max(1, *part) for part in zip(*lengths, strict=True)]
    found = simulate_backward(
        known,
        *(problem.do, problem.q, problem.k, problem.v, out, lse),
        dlse=problem.dlse,
        options=options,
        starts=(q_starts, kv_starts),
        max_lengths=(longest[0], longest[1]),
        check_hazards="stop",
        arch=arch_with_room_for(known),
        **how,
    )
    for gradient, starts in ((found.dq, q_starts), (found.dk, kv_starts), (found.dv, kv_starts)):
        for unowned in (gradient[:, :, : starts[0]], gradient[:, :, starts[-1] :]):
            assert not unowned.astype(bool).any()
    for b, (rows, keys) in enumerate(sequences):
        if b in spoilt:
            continue
        part = BackwardSimulation(
            found.dq[:, :, rows], found.dk[:, :, keys], found.dv[:, :, keys], found.run, found.companions
        )
        if 0 in lengths[b]:  # nobody attends to anything
            assert not any(gradient.astype(bool).any() for gradient in (part.dq, part.dk, part.dv))
        else:
            check_gradients(problem.part(rows, keys), part)
