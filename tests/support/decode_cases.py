"""Simulated decodes, checked against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from flashwright.kernels.registry import family_of, parse_config
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.simulated import ForwardSimulation, simulate_decode


def truth(q: Any, k: Any, v: Any, causal: bool, window: Any, softcap: float) -> tuple[Any, Any]:
    """Of one sequence: (heads, rows, head_dim), (kv_heads, keys, head_dim)."""
    k, v = (x.double().repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q.double() @ k.mT * q.shape[2] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = q.shape[1], k.shape[1]
    i, j = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None]
    left, right = window or (None, None)
    right = 0 if causal else right
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return weights @ v, lse


def decoded(
    config: Any,
    *,
    heads: tuple[int, int] = (4, 2),
    rows: int = 1,
    capacity: int = 200,
    lengths: tuple[int, ...] = (200, 77),
    causal: bool = False,
    window: Any = None,
    softcap: float = 0.0,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    lengths_on_device: bool = True,
    seed: int = 0,
    **arguments: Any,
) -> ForwardSimulation:
    """A simulated decode, which is checked. If the device does not know the lengths, all of them are the capacity."""
    config = parse_config(config) if isinstance(config, str) else config
    dtype = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16}[config.dtype]
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    head_dim = head_dim or config.d_head
    q = some(len(lengths), heads[0], rows, head_dim)
    k, v = (some(len(lengths), heads[1], capacity, columns) for columns in (head_dim, value_head_dim or head_dim))
    if most := family_of(config).launch_rules.values_in_keys:
        v = k[..., : value_head_dim or most].contiguous()
    simulated = simulate_decode(
        config, *(x.view(torch.int16).numpy().view(NUMPY_DTYPES[config.dtype]) for x in (q, k, v)),
        kv_lengths=np.array(lengths) if lengths_on_device else None,
        options=AttentionOptions.of(causal, window, None, softcap), return_lse=True, **arguments,
    )  # fmt: skip
    assert simulated.lse is not None
    tolerance = 1.5e-2 if config.dtype is DType.BF16 else 2e-3
    for b, n in enumerate(lengths):
        out, lse = truth(q[b], k[b, :, :n], v[b, :, :n], causal, window, softcap)
        np.testing.assert_allclose(simulated.output[b].astype(float), out, atol=tolerance)
        np.testing.assert_allclose(simulated.lse[b], lse, atol=1e-3)
    return simulated
