"""What ranks compute in tests, and what one process computes in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from flashwright import distributed
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.reference import attention_reference

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """A problem as `distributed.attention` takes it; `mesh` is the shape of a mesh of all ranks."""

    length: int = 37
    kv_length: int | None = None
    layout: Any = "zigzag"
    strategy: Any = "ring"
    heads: tuple[int, int] = (4, 2)
    starts: tuple[int, ...] | None = None
    kv_starts: tuple[int, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] | None = None
    batch: int = 2
    head_dim: int = 8
    value_head_dim: int | None = None
    """If it is another."""
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    tells_length: bool = False
    call: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and the gradients of the output and of the log-sum-exp, of the whole sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        keys = self.length if self.kv_length is None else self.kv_length

        def normal(heads: int, rows: int, *rest: int) -> torch.Tensor:
            x = torch.randn(self.batch, heads, rows, *rest, generator=generator, dtype=torch.float64)
            return x.to(self.device, self.dtype)

        q_heads, kv_heads = self.heads
        of_v = self.head_dim if self.value_head_dim is None else self.value_head_dim
        q, do = (normal(q_heads, self.length, columns) for columns in (self.head_dim, of_v))
        k, v = (normal(kv_heads, keys, columns) for columns in (self.head_dim, of_v))
        return [q, k, v, do, normal(q_heads, self.length).double()]


def expected(case: Case) -> list[torch.Tensor]:
    """Output, log-sum-exp and gradients of the whole sequence by one process in float64."""
    q, k, v, do, dlse = (x.double() for x in case.tensors())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    starts = case.starts or (0, q.shape[2])
    kv_starts = case.kv_starts or case.starts or (0, k.shape[2])
    options = AttentionOptions.of(**case.options)
    found = [
        attention_reference(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], options=options)
        for (a, b), (c, d) in zip(pairwise(starts), pairwise(kv_starts), strict=True)
    ]
    out, lse = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
    _loss(out, lse, do, dlse).backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v)]
    return [out.detach(), lse.detach(), *gradients]


def _loss(out: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    nothing = lse.detach() == -math.inf
    return (out * do).sum() + (lse.masked_fill(nothing, 0) * dlse.to(lse.dtype).masked_fill(nothing, 0)).sum()


def mesh_of(case: Case) -> Any:
    if case.mesh is None:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    names = ("sequence", "heads")[: len(case.mesh)]
    return init_device_mesh("cpu", case.mesh, mesh_dim_names=names)


def computed(case: Case, group: Any = None) -> list[torch.Tensor]:
    """This rank's rows of output, log-sum-exp and gradients, by all ranks together."""
    group = mesh_of(case) if group is None else group
    layout = case.layout
    q, k, v, do, dlse = (distributed.shard(x, 2, group, layout) for x in case.tensors())
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out, lse = distributed.attention(
        q, k, v, group, layout, case.strategy, return_lse=True, cu_seqlens=case.starts, cu_seqlens_k=case.kv_starts,
        length=case.length if case.tells_length else None, kv_length=case.kv_length if case.tells_length else None,
        **case.options, **case.call,
    )  # fmt: skip
    _loss(out, lse, do, dlse).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in (q, k, v))]


def check_cases(cases: Sequence[Case], tolerance: float = 1e-9) -> int:
    """Raises `AssertionError` for a case whose results on this rank differ from one process's; how many there were."""
    for case in cases:
        group = mesh_of(case)
        for name, actual, whole in zip(NAMES, computed(case, group), expected(case), strict=True):
            mine = distributed.shard(whole, 2, group, case.layout)
            assert actual.shape == mine.shape, f"{name}: {actual.shape}, expected {mine.shape}: {case}"
            finite = mine != -math.inf
            assert torch.equal(finite, actual != -math.inf), f"{name}: rows without keys differ: {case}"
            scale = 1 if tolerance < 1e-6 else float(whole[whole != -math.inf].abs().amax())
            off = (actual.double() - mine)[finite].abs().amax() if finite.any() else torch.zeros(())
            assert off <= tolerance * scale, f"{name}: off by {off:.2e}: {case}"
    return len(cases)


def call_that_fails_on(rank: int, how: str) -> None:
    """Every rank takes part in a call during which one fails in its kernel, its arguments, by exiting, or by meaning
    another call."""
    import os

    import torch.distributed as dist

    from flashwright.distributed import parts

    case = Case(64, options={"causal": True})
    q, k, v = (distributed.shard(x, 2) for x in case.tensors()[:3])
    distributed.attention(q, k, v, strategy="ring", **case.options)
    options = dict(case.options)
    if dist.get_rank() == rank:
        if how == "kernel":

            def broken(*arguments: Any) -> Any:
                raise ValueError("out of registers")

            parts.Kernels.forward = broken  # type: ignore[method-assign]
        elif how == "argument":
            v = v[:, :, 1:]
        elif how == "exit":
            os._exit(3)
        else:
            options["softcap"] = 3.0
    distributed.attention(q, k, v, strategy="ring", **options)
