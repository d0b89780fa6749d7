"""Problems for the kernels of any family on the simulated GPU, hazards checked, against attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from flashwright import DType
from flashwright.kernels.family import KernelConfig
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.reference import reference_forward, relative_error
from flashwright.runtime.simulated import ForwardSimulation, simulate_forward

ROUNDING = {DType.FP16: 5e-4, DType.BF16: 4e-3}
"""Relative error that 16-bit inputs to the second product explain: about one unit in the last place."""


class Shape(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    q_rows: int
    kv_rows: int
    head_dim: int


def random(generator: np.random.Generator, *shape: int, dtype: DType) -> np.ndarray:
    return generator.standard_normal(shape).astype(NUMPY_DTYPES[dtype])


def random_problem(shape: Shape, dtype: DType, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    q = random(generator, shape.batch, shape.q_heads, shape.q_rows, shape.head_dim, dtype=dtype)
    k, v = (
        random(generator, shape.batch, shape.kv_heads, shape.kv_rows, shape.head_dim, dtype=dtype) for _ in range(2)
    )
    return q, k, v


def check(
    config: KernelConfig,
    shape: Sequence[int],
    options: dict[str, Any],
    *,
    with_lse: Sequence[bool] = (False, True),
) -> None:
    """The outputs and, of the kernels that return it, the log-sum-exp are those of attention by definition."""
    q, k, v = random_problem(Shape(*shape), config.dtype)
    output, lse = reference_forward(q, k, v, **options)
    for return_lse in with_lse:
        simulation = simulate_forward(config, q, k, v, return_lse=return_lse, **options)
        check_output(config, simulation, output, lse)
        assert simulation.run.counters.bank_conflicts == 0


UNOWNED_ROWS = {
    "behind": (0, 37, [(40, 33), (70, 20)]),
    "before": (21, 0, [(40, 33), (70, 20)]),
    "both": (3, 200, [(5, 33), (0, 7)]),
    "longer than any sequence": (130, 300, [(1, 1)]),
    "of no rows of any sequence": (1, 129, [(0, 5), (0, 1)]),
}
"""Rows before the first sequence, behind the last, and the sequences' (rows, keys)."""


def check_output(config: KernelConfig, found: ForwardSimulation, output: np.ndarray, lse: np.ndarray) -> None:
    if np.any(output):
        assert relative_error(found.output, output) < ROUNDING[config.dtype]
    assert np.all(found.output[np.isinf(lse)] == 0)
    if found.lse is not None:
        np.testing.assert_allclose(found.lse, lse, atol=2e-5, rtol=0)


def check_packed(
    config: KernelConfig,
    lengths: Sequence[tuple[int, int]],
    options: dict[str, Any],
    *,
    heads: tuple[int, int] = (2, 1),
    head_dim: int | None = None,
    spoilt: Sequence[int] = (),
    rows_before: int = 0,
    rows_behind: int = 0,
    return_lse: bool = True,
    seed: int = 0,
) -> None:
    """Sequences of (rows, keys) that lie one after the other are computed apart: what is NaN or infinite in the spoilt
    ones does not reach the others. Rows of no sequence, before the first and behind the last, are zero."""
    q_starts, kv_starts = (np.cumsum([0, *part]).astype(np.int32) for part in zip(*lengths, strict=True))
    q_starts += rows_before
    q_rows = max(1, int(q_starts[-1]) + rows_behind)
    shape = Shape(1, *heads, q_rows, max(1, int(kv_starts[-1])), head_dim or config.d_head)
    q, k, v = random_problem(shape, config.dtype, seed)
    sequences = [
        (slice(*rows), slice(*keys)) for rows, keys in zip(pairwise(q_starts), pairwise(kv_starts), strict=True)
    ]
    for b in spoilt:
        rows, keys = sequences[b]
        q[:, :, rows], k[:, :, keys], v[:, :, keys] = np.nan, np.nan, np.inf
    longest = [max(1, *part) for part in zip(*lengths, strict=True)]
    found = simulate_forward(
        config,
        q,
        k,
        v,
        return_lse=return_lse,
        starts=(q_starts, kv_starts),
        max_lengths=(longest[0], longest[1]),
        **options,
    )
    for rows in (slice(0, rows_before), slice(int(q_starts[-1]), q_rows)):
        assert np.all(found.output[:, :, rows] == 0)
        assert found.lse is None or np.all(found.lse[:, :, rows] == -np.inf)
    for b, (rows, keys) in enumerate(sequences):
        if b in spoilt or lengths[b][0] == 0:
            continue
        if lengths[b][1] == 0:
            assert np.all(found.output[:, :, rows] == 0)
            assert found.lse is None or np.all(found.lse[:, :, rows] == -np.inf)
            continue
        output, lse = reference_forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], **options)
        part_lse = None if found.lse is None else found.lse[:, :, rows]
        part = ForwardSimulation(found.output[:, :, rows], part_lse, found.run)
        check_output(config, part, output, lse)
