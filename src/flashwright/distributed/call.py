"""`attention()` on the shards of a sequence that several ranks hold."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flashwright.attention import BACKENDS, Backend, Causal
from flashwright.distributed.heads import HeadShares
from flashwright.distributed.layouts import (
    ZIGZAG,
    Holdings,
    Layout,
    check_document_starts,
    frozen,
    holdings,
    local_rows,
)
from flashwright.distributed.links import Link, link_named
from flashwright.distributed.parts import Kernels
from flashwright.distributed.ranks import Ranks, head_exchange, shared_by_heads
from flashwright.distributed.recorded import DistributedAttention, RankCall
from flashwright.distributed.rounds import RING, rounds_of
from flashwright.distributed.sequence import SharedSequence
from flashwright.distributed.strategies import AUTO, Strategy, StrategyChoice, chosen_strategy, named_strategy
from flashwright.distributed.transport import Transport
from flashwright.distributed.visibility import Mask
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_named
from flashwright.operators.columns import in_kernel_columns
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import MAX_D_HEAD, as_size, check_shapes
from flashwright.runtime.tensors import check_kernel_dtype, check_tensors

Starts = tuple[tuple[int, ...], tuple[int, ...]]


class Lengths(NamedTuple):
    """Positions of the whole sequence: of queries, and of keys."""

    q: int
    kv: int


@torch.compiler.disable  # a compiled model calls it between its graphs
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    layout: Layout = ZIGZAG,
    strategy: str | Sequence[str] = AUTO,
    *,
    length: int | None = None,
    kv_length: int | None = None,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: Causal = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    family: str | None = None,
    config: KernelConfig | str | None = None,
    backend: Backend | None = None,
    deterministic: bool = False,
    link: str | Link | None = None,
) -> Any:
    """`flashwright.attention` over a whole sequence of which each rank holds a shard; every rank calls it.

    `q` is (batch, heads, local rows, head_dim), `k` and `v` are (batch, kv_heads, local keys, head_dim): the rows that
    `shard` gives this rank. Values may have another head dimension; then the smaller ones are copied, with columns of
    zeros, which travel too. The output has q's rows. Causal masks and windows go by positions in the whole sequence.
    Results of parts are merged in fp32, and gradients are added in fp32.

    - `group`: a process group, a DeviceMesh of one dimension or of two (ranks of the first share the sequence, of the
      second heads), or None: the default group; without one, this process alone.
    - `layout`: "zigzag", "contiguous", `Documents(cu_seqlens)`, or every rank's (start, stop) pairs.
    - `strategy`: "ring", "all-gather", "all-to-all", or "auto", by the cost model; for a mesh of two dimensions a pair
      such as ("ring", "all-to-all"). `strategy_for` says which, and why.
    - `length`, `kv_length`: of the whole sequence. Without them ranks tell each other how many rows they hold, and
      check that they all mean the same call; with them they need not, which saves a message to all.
    - `cu_seqlens`: the starts of packed sequences in the whole, which attend to themselves only; `cu_seqlens_k` if
      those of the keys differ. Of batch 1 or of rows of a batch that are packed alike.
    - `link` names what connects the ranks ("nvlink", "ib400", …), for "auto".

    The other arguments are those of `flashwright.attention`. A rank that fails makes all ranks raise.
    """
    ranks = Ranks.of(group)
    with ranks.failing_together():
        check_tensors(q, k, v)
        value_columns = v.shape[-1] if v.dim() else 0
        if v.shape[:-1] == k.shape[:-1] and 0 < value_columns <= MAX_D_HEAD:
            check_shapes(q.shape, k.shape, k.shape)
            q, k, v, scale = in_kernel_columns(q, k, v, scale)
        check_shapes(q.shape, k.shape, v.shape)
        options = AttentionOptions.of(causal, window, scale, softcap)
        if family is not None:
            family_named(family)
        layout = frozen(layout)
        starts = _starts(cu_seqlens, cu_seqlens_k)
        records = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        lengths = _lengths(
            q, k, ranks, length, kv_length, layout=layout, strategy=strategy, options=options, cu_seqlens=starts,
            link=link, return_lse=return_lse, gradients=records,
        )  # fmt: skip
        mask = _mask(options, lengths, starts)
        by_rank = (holdings(layout, lengths.q, ranks.size), holdings(layout, lengths.kv, ranks.size))
        for name, x, each in zip("qk", (q, k), by_rank, strict=True):
            if x.shape[2] != (expected := local_rows(each[ranks.index])):
                raise ValueError(
                    f"{name}: {x.shape[2]} rows, but of {sum(map(local_rows, each))} rank {ranks.index} of "
                    f"{ranks.size} holds {expected} in this layout"
                )
        wanted = _strategy(strategy, q, k, ranks, by_rank, mask, link).strategy
        kernels = Kernels(
            options, _checked_backend(q, backend, config is not None or family is not None), config, family,
            deterministic,
        )  # fmt: skip
        call = _call(q, k, ranks, by_rank, mask, wanted, kernels, return_lse)
        ranks.connect(q.device)
    out, lse = DistributedAttention.apply(call, q, k, v) if records else call.forward(q, k, v)[:2]
    if out.shape[-1] != value_columns:
        out = out[..., :value_columns]
    return (out, lse) if return_lse else out


def strategy_for(
    q: torch.Tensor,
    k: torch.Tensor,
    group: Any = None,
    layout: Layout = ZIGZAG,
    strategy: str | Sequence[str] = AUTO,
    *,
    length: int | None = None,
    kv_length: int | None = None,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: Causal = False,
    window: Sequence[int | None] | None = None,
    link: str | Link | None = None,
) -> StrategyChoice:
    """The strategy that `attention` uses for such shards, and why; the arguments are the same. Nothing is computed."""
    ranks = Ranks.of(group)
    with ranks.failing_together():
        options = AttentionOptions.of(causal, window)
        check_tensors(q, k, k)
        check_shapes(q.shape, k.shape, k.shape)
        layout = frozen(layout)
        starts = _starts(cu_seqlens, cu_seqlens_k)
        lengths = _lengths(
            q, k, ranks, length, kv_length, layout=layout, strategy=strategy, options=options, cu_seqlens=starts,
            link=link,
        )  # fmt: skip
        mask = _mask(options, lengths, starts)
        by_rank = (holdings(layout, lengths.q, ranks.size), holdings(layout, lengths.kv, ranks.size))
        return _strategy(strategy, q, k, ranks, by_rank, mask, link)


def _call(
    q: Any,
    k: Any,
    ranks: Ranks,
    by_rank: tuple[Holdings, Holdings],
    mask: Mask,
    strategy: Strategy,
    kernels: Kernels,
    needs_lse: bool,
) -> RankCall:
    q_holdings, kv_holdings = by_rank
    heads, shares, kv_heads, index = None, None, k.shape[1], ranks.index
    if strategy.head_ranks > 1:
        transport = ranks.whole if ranks.heads is None else ranks.heads
        shares = HeadShares.of(q.shape[1], k.shape[1], strategy.head_ranks)
        if q_holdings != kv_holdings:
            raise ValueError(
                "strategy: all-to-all exchanges rows of q, k and v alike, but the whole sequence has "
                f"{mask.q_starts[-1]} queries and {mask.kv_starts[-1]} keys; allowed here: 'ring', 'all-gather'"
            )
        heads = head_exchange(transport, q_holdings, index)
        of_each = shares.kv_head_of_each(transport.rank)
        kv_heads = shares.kv[transport.rank].length if of_each is None else len(of_each)
        q_holdings = kv_holdings = shared_by_heads(q_holdings, strategy.head_ranks)
        index //= strategy.head_ranks
    sequence = ranks.whole if ranks.sequence is None else ranks.sequence
    if strategy.sequence_ranks == 1:
        sequence = Transport.alone()
    rounds = rounds_of(strategy.sequence or RING, index, q_holdings, kv_holdings, mask, kv_heads, strategy.steps)
    return RankCall(ranks, SharedSequence(sequence, rounds, kernels), heads, shares, needs_lse)


# --- What the ranks agree on -----------------------------------------------------------------------------------------


def _lengths(q: Any, k: Any, ranks: Ranks, length: int | None, kv_length: int | None, **request: Any) -> Lengths:
    """Of the whole sequence, as given or as the ranks tell each other. `request`: what else they have to agree on."""
    if length is not None:
        if kv_length is None and q.shape[2] != k.shape[2]:
            raise ValueError(f"kv_length: missing; q has {q.shape[2]} local rows and k has {k.shape[2]}")
        return Lengths(as_size("length", length), as_size("kv_length", length if kv_length is None else kv_length))
    if kv_length is not None:
        raise ValueError(f"length: missing; kv_length is {kv_length!r}, and both are told, or none")
    sizes = {"batch": q.shape[0], "heads of q": q.shape[1], "heads of k": k.shape[1], "head_dim": q.shape[3]}
    request = {"dtype": q.dtype, "the mesh": ranks.shape, **request}
    of_all = [*sizes.values(), *(zlib.crc32(repr(value).encode()) for value in request.values())]
    found = ranks.whole.gathered([q.shape[2], k.shape[2], *of_all], q.device)
    for rank, (_, _, *theirs) in enumerate(found):
        for name, mine, other in zip((*sizes, *request), of_all, theirs, strict=True):
            if mine != other:
                values = f" ({mine} and {other})" if name in sizes else ""
                raise ValueError(f"ranks {ranks.whole.rank} and {rank} disagree about {name}{values}")
    return Lengths(sum(each[0] for each in found), sum(each[1] for each in found))


def _starts(cu_seqlens: Any, cu_seqlens_k: Any) -> Starts | None:
    """Of packed queries, and of packed keys."""
    if cu_seqlens is None:
        if cu_seqlens_k is not None:
            raise ValueError("cu_seqlens: missing; cu_seqlens_k needs those of the queries, too")
        return None
    starts = as_starts("cu_seqlens", cu_seqlens)
    return starts, starts if cu_seqlens_k is None else as_starts("cu_seqlens_k", cu_seqlens_k)


def _mask(options: AttentionOptions, lengths: Lengths, starts: Starts | None) -> Mask:
    if starts is None:
        return Mask(options.window, (0, lengths.q), (0, lengths.kv))
    q_starts, kv_starts = starts
    check_document_starts("cu_seqlens", q_starts, lengths.q)
    check_document_starts("cu_seqlens_k", kv_starts, lengths.kv)
    if len(q_starts) != len(kv_starts):
        raise ValueError(f"cu_seqlens_k: {len(kv_starts)} entries, but cu_seqlens has {len(q_starts)}")
    return Mask(options.window, q_starts, kv_starts)


def as_starts(name: str, starts: Any) -> tuple[int, ...]:
    """cu_seqlens as Python's numbers; those of a tensor are read."""
    try:
        return tuple(map(operator.index, starts.tolist() if hasattr(starts, "tolist") else starts))
    except TypeError:
        raise TypeError(f"{name}: expected integers, one more than there are sequences, got {starts!r}") from None


def _strategy(
    strategy: str | Sequence[str],
    q: Any,
    k: Any,
    ranks: Ranks,
    by_rank: tuple[Holdings, Holdings],
    mask: Mask,
    link: str | Link | None,
) -> StrategyChoice:
    if not isinstance(strategy, str) or strategy != AUTO:
        return named_strategy(strategy, ranks.shape, k.shape[1])
    return chosen_strategy(
        ranks.shape, *by_rank, mask, batch=q.shape[0], q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3],
        element_bytes=q.element_size(), link=link_named(_link_of(q) if link is None else link),
    )  # fmt: skip


@lru_cache(maxsize=4)
def _several_machines() -> bool:
    import os

    local, world = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return local is not None and world is not None and local != world


def _link_of(q: Any) -> str:
    """The same on all ranks: by torchrun's word for how many ranks a machine has."""
    if not q.is_cuda:
        return "gloo"
    return "ib400" if _several_machines() else "nvlink"


def _checked_backend(q: Any, backend: Backend | None, named_kernel: bool) -> str:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known; allowed: {', '.join(map(repr, BACKENDS))}")
    chosen = backend or ("gpu" if q.is_cuda else "simulator" if named_kernel else "reference")
    if chosen == "gpu" and not q.is_cuda:
        raise ValueError(f"backend: 'gpu' needs CUDA tensors, but q is on {q.device}")
    if chosen == "simulator" and q.device.type != "cpu":
        raise ValueError(f"backend: 'simulator' needs CPU tensors, but q is on {q.device}")
    if chosen == "reference" and named_kernel:
        raise ValueError("config and family name a kernel, which backend='reference' does not run; leave them out")
    if chosen != "reference":
        check_kernel_dtype(q)
    return chosen
