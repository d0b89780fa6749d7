"""Sharding of tensors along a sequence, and of the batches that models are trained on."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashwright.distributed.layouts import ZIGZAG, Chunk, Holdings, Layout, holdings, local_rows
from flashwright.distributed.ranks import Ranks
from flashwright.problem.shapes import as_size
from flashwright.runtime.tensors import check_is_tensor

SEQUENCE_DIMENSION = 1
"""Of tokens, labels and position ids: (batch, rows, …)."""
IGNORED_LABEL = -100
"""What PyTorch's cross entropy leaves out."""
UNSHARDED = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Of the whole sequence, and the same on all ranks."""


def shard(x: Tensor, dim: int, group: Any = None, layout: Layout = ZIGZAG) -> Tensor:
    """This rank's rows of a tensor that every rank has, along `dim`, contiguous; any length will do.

    `group` and `layout` are those of `attention`. Differentiable: the gradient of x is 0 in the rows of other ranks.
    """
    ranks = Ranks.of(group)
    dim = _dimension(x, dim)
    return _rows_of(x, dim, holdings(layout, x.shape[dim], ranks.size)[ranks.index])


@torch.compiler.disable
def unshard(x: Tensor, dim: int, group: Any = None, layout: Layout = ZIGZAG, length: int | None = None) -> Tensor:
    """The whole tensor, on every rank, from the rows along `dim` that each holds; every rank calls it.

    Without `length` ranks tell each other how many rows they hold. Differentiable: what the ranks compute from the
    whole is added, so the loss is the sum of all ranks' losses.
    """
    ranks = Ranks.of(group)
    with ranks.failing_together():
        dim = _dimension(x, dim)
        if length is None:
            length = sum(rows for (rows,) in ranks.whole.gathered([x.shape[dim]], x.device))
        by_rank = holdings(layout, as_size("length", length), ranks.size)
        if x.shape[dim] != (expected := local_rows(by_rank[ranks.index])):
            raise ValueError(
                f"x: {x.shape[dim]} rows along dimension {dim}, but of {length} rank {ranks.index} of {ranks.size} "
                f"holds {expected} in this layout"
            )
        ranks.connect(x.device)
    return _Unshard.apply(x, dim, ranks, by_rank)


def positions(length: int, group: Any = None, layout: Layout = ZIGZAG, device: Any = None) -> Tensor:
    """The positions in the whole sequence of this rank's rows."""
    return shard(torch.arange(as_size("length", length), device=device), 0, group, layout)


def shard_batch(
    batch: Mapping[str, Any], group: Any = None, layout: Layout = ZIGZAG, dim: int = SEQUENCE_DIMENSION
) -> dict[str, Any]:
    """This rank's share of a batch for a causal language model, as `transformers` takes it.

    Tensors with `input_ids`' length along `dim` are sharded; cu_seqlens and the rest stay as they are. `position_ids`
    are added where there are none. If there are labels, so are `shift_labels`: those of the next token, which may be
    another rank's. The losses of `transformers` take them, where given, instead of `labels`.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        has = f"the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise TypeError(f"batch: expected a mapping with 'input_ids', got {has}")
    tokens = batch["input_ids"]
    dim = _dimension(tokens, dim, "input_ids")
    length = tokens.shape[dim]
    found = dict(batch)
    if "position_ids" not in found:
        found["position_ids"] = torch.arange(length, device=tokens.device).expand((*tokens.shape[:dim], length))
    labels = found.get("labels")
    if labels is not None and "shift_labels" not in found:
        end = torch.full_like(labels.narrow(dim, 0, 1), IGNORED_LABEL)
        found["shift_labels"] = torch.cat((labels.narrow(dim, 1, length - 1), end), dim)
    for name, x in found.items():
        if name not in UNSHARDED and isinstance(x, Tensor) and x.ndim > dim and x.shape[dim] == length:
            found[name] = shard(x, dim, group, layout)
    return found


def _dimension(x: Any, dim: Any, name: str = "x") -> int:
    """The number of a dimension of a tensor, counted from its first; raises for what is none."""
    check_is_tensor(name, x)
    try:
        dim = operator.index(dim)
    except TypeError:
        raise TypeError(f"dim: expected an integer, got {dim!r}") from None
    if not -x.ndim <= dim < x.ndim:
        allowed = f"-{x.ndim} to {x.ndim - 1}" if x.ndim else "none"
        raise ValueError(f"dim: {dim} is not allowed; allowed: {allowed}, as {name} has {x.ndim} dimensions")
    return dim % x.ndim


def _rows_of(x: Tensor, dim: int, chunks: tuple[Chunk, ...]) -> Tensor:
    parts = [x.narrow(dim, chunk.start, chunk.length) for chunk in chunks]
    if len(parts) == 1:
        return parts[0].contiguous()  # on all ranks alike: those with several chunks have a copy, too
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).contiguous()


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, ranks: Ranks, by_rank: Holdings) -> Tensor:
        ctx.dim, ctx.ranks, ctx.by_rank = dim, ranks, by_rank
        return _gathered(x, dim, ranks, by_rank)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _added(gradient, ctx.dim, ctx.ranks, ctx.by_rank), None, None, None


def _gathered(x: Tensor, dim: int, ranks: Ranks, by_rank: Holdings) -> Tensor:
    mine = x.detach().movedim(dim, 0).contiguous()
    parts = [mine.new_empty((local_rows(chunks), *mine.shape[1:])) for chunks in by_rank]
    parts[ranks.index] = mine
    others = [rank for rank in range(ranks.size) if rank != ranks.index]
    with ranks.failing_together():
        ranks.whole.start([(rank, mine) for rank in others], [(rank, parts[rank]) for rank in others]).wait()
    whole = mine.new_empty((sum(map(local_rows, by_rank)), *mine.shape[1:]))
    for part, chunks in zip(parts, by_rank, strict=True):
        row = 0
        for chunk in chunks:
            whole[chunk.start : chunk.stop] = part[row : row + chunk.length]
            row += chunk.length
    return whole.movedim(0, dim)


def _added(gradient: Tensor, dim: int, ranks: Ranks, by_rank: Holdings) -> Tensor:
    """Every rank's gradient of this rank's rows, added."""
    rows = gradient.movedim(dim, 0)
    going = [_rows_of(rows, 0, chunks) for chunks in by_rank]
    mine = going[ranks.index]
    others = [rank for rank in range(ranks.size) if rank != ranks.index]
    coming = [torch.empty_like(mine) for _ in others]
    with ranks.failing_together():
        ranks.whole.start([(rank, going[rank]) for rank in others], list(zip(others, coming, strict=True))).wait()
    total = mine.to(torch.promote_types(mine.dtype, torch.float32))
    for part in coming:
        total = total + part
    return total.to(gradient.dtype).movedim(0, dim)
