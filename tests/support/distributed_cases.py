"""What ranks compute in tests, and what one process computes in float64."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flashwright import distributed
from flashwright.distributed import parts
from flashwright.distributed.transport import Transport
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


# --- Failures --------------------------------------------------------------------------------------------------------


LINGERS_S = 20.0


def call_that_fails_on(rank: int, how: str, mesh: tuple[int, int] | None = None) -> None:
    """Every rank takes part in a call during which one fails in its kernel, its arguments, by being killed, or by
    meaning another call. Its process lives on until all others have raised: nothing but it can tell them."""
    case = Case(64, options={"causal": True}, mesh=mesh)
    group = mesh_of(case)
    q, k, v = (distributed.shard(x, 2, group) for x in case.tensors()[:3])
    distributed.attention(q, k, v, group, **case.options)
    options: dict[str, Any] = dict(case.options)
    if how != "disagreement":
        options["length"] = 64
    if dist.get_rank() == rank:
        if how == "kernel":

            def broken(*arguments: Any) -> Any:
                raise ValueError("out of registers")

            parts.Kernels.forward = broken  # type: ignore[method-assign]
        elif how == "argument":
            v = v[:, :, 1:]
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            options["softcap"] = 3.0
    began = time.monotonic()
    store = dist.distributed_c10d._get_default_store()
    try:
        distributed.attention(q, k, v, group, **options)
    except Exception:
        waited = time.monotonic() - began
        assert waited < LINGERS_S, "it took the end of the failing process to raise"
        if how != "killed":
            store.add("raised", 1)
            while store.add("raised", 0) < dist.get_world_size() and time.monotonic() - began < LINGERS_S:
                time.sleep(0.01)
        raise


def call_after_the_store_has_gone() -> None:
    """Rank 0, which has the store of the default group, is killed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    files = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        files.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(files.get("port")), size, is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    call_that_fails_on(0, "killed")


def check_disagreements() -> None:
    """Calls that ranks do not mean alike, each in a group of its own."""
    case = Case(32)
    q, k, v = (distributed.shard(x, 2) for x in case.tensors()[:3])
    differs = dist.get_rank() == 1
    of_others: dict[str, Any] = {"return_lse": False, "cu_seqlens": (0, 20, 32), "link": "gloo", "strategy": "ring"}
    of_one: dict[str, Any] = {"return_lse": True, "cu_seqlens": (0, 8, 32), "link": "ib400", "strategy": "all-gather"}
    for name in (*of_one, "gradients"):
        options = {name: (of_one if differs else of_others)[name]} if name in of_one else {}
        first = q.clone().requires_grad_(name == "gradients" and differs)
        with pytest.raises(ValueError, match=f"disagree about {name}"):
            distributed.attention(first, k, v, dist.new_group(), **options)


# --- Groups and messages ---------------------------------------------------------------------------------------------


def check_a_mesh_of_some_ranks(members: list[list[int]]) -> None:
    """Neither has names, nor are ranks in order."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.tensor(members))
    case = Case(strategy=("ring", "all-to-all"), options={"causal": True})
    if mesh.get_coordinate() is None:
        with pytest.raises(ValueError, match="group: this rank is not in the mesh"):
            computed(case, mesh)
        return
    for actual, whole in zip(computed(case, mesh), expected(case), strict=True):
        torch.testing.assert_close(actual, distributed.shard(whole, 2, mesh))
        assert torch.equal(distributed.unshard(distributed.shard(whole, 2, mesh), 2, mesh), whole)


def check_a_gradient_that_one_rank_does_not_have(strategy: str) -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return None

    case = Case(strategy=strategy)
    q, k, v = (distributed.shard(x, 2).clone().requires_grad_() for x in case.tensors()[:3])
    out = distributed.attention(q, k, v, strategy=strategy)
    (Nothing.apply(out) if dist.get_rank() == 0 else out).sum().backward()
    assert q.grad.any() == (dist.get_rank() != 0)
    assert v.grad.all(), "rows of other ranks attend to these values"


def counted(case: Case) -> dict[str, Any]:
    """Of one call on this rank, forward and backward: rows of keys or gradients that it sends, by target; launches."""
    sent: list[tuple[int, int]] = []
    launches: list[str] = []
    connected: list[bool] = []
    post, forward, backward = Transport.post, parts.Kernels.forward, parts.Kernels.backward

    def counting(name: str, function: Any) -> Any:
        def launch(*arguments: Any) -> Any:
            launches.append(name)
            return function(*arguments)

        return launch

    def posting(transport: Transport, sends: Any, receives: Any) -> Any:
        sent.extend((rank, tensor.shape[0]) for rank, tensor in sends)
        return post(transport, sends, receives)

    parts.Kernels.forward = counting("forward", forward)  # type: ignore[method-assign]
    parts.Kernels.backward = counting("backward", backward)  # type: ignore[method-assign]
    Transport.post = posting  # type: ignore[method-assign]
    Transport.connect = lambda transport, device: connected.append(True)  # type: ignore[method-assign]
    check_cases([case])
    return {"sent": sent, "launches": launches, "connects": len(connected)}
