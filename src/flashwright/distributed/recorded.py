"""A call on one rank: what it exchanges and computes, forward and backward; and autograd's record of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashwright.distributed.heads import HeadExchange, HeadShares
from flashwright.distributed.ranks import Ranks
from flashwright.distributed.sequence import SharedSequence

Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class RankCall:
    """Heads are exchanged for rows first, where ranks share heads; the ranks that then hold the same heads share the
    sequence."""

    ranks: Ranks
    sequence: SharedSequence
    heads: HeadExchange | None = None
    shares: HeadShares | None = None
    needs_lse: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, log-sum-exp, and what the backward needs."""
        with self.ranks.failing_together():
            q_heads = q.shape[1]
            if self.heads is not None and self.shares is not None:
                shares = self.shares
                q, k, v = self.heads.to_all_rows([(q, shares.q), (k, shares.kv), (v, shares.kv)])
            precise, lse = self.sequence.forward(q, *self._computed_heads(k, v))
            out = precise.to(q.dtype)
            kept = (q, k, v, out, lse)
            if self.heads is not None and self.shares is not None:
                back = [(out, self.shares.q, q_heads)]
                if self.needs_lse:
                    back.append((lse, self.shares.q, q_heads))
                out, *rest = self.heads.to_own_rows(back)
                lse = rest[0] if rest else lse.new_empty(0)
            return out, lse, kept

    def backward(self, do: Tensor, dlse: Tensor | None, kept: tuple[Tensor, ...], heads: tuple[int, int]) -> Gradients:
        """`heads`: those of q, and of k and v, in all."""
        with self.ranks.failing_together():
            q, k, v, out, lse = kept
            if self.heads is not None and self.shares is not None:
                outputs = [(do, self.shares.q)] if dlse is None else [(do, self.shares.q), (dlse, self.shares.q)]
                do, *rest = self.heads.to_all_rows(outputs)
                dlse = rest[0] if rest else None
            dq, dk, dv = self.sequence.backward(do, dlse, q, *self._computed_heads(k, v), out, lse)
            if self.heads is not None and self.shares is not None:
                dk, dv = self._summed_heads(k, dk), self._summed_heads(v, dv)
                q_heads, kv_heads = heads
                dq, dk, dv = self.heads.to_own_rows(
                    [(dq, self.shares.q, q_heads), (dk, self.shares.kv, kv_heads), (dv, self.shares.kv, kv_heads)]
                )
            return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def _kv_head_of_each(self) -> list[int] | None:
        if self.heads is None or self.shares is None:
            return None
        return self.shares.kv_head_of_each(self.heads.transport.rank)

    def _computed_heads(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k and v as kernels take them: of equal numbers of heads of q for each of theirs."""
        of_each = self._kv_head_of_each()
        return (k, v) if of_each is None else (k[:, of_each], v[:, of_each])

    def _summed_heads(self, x: Tensor, gradient: Tensor) -> Tensor:
        of_each = self._kv_head_of_each()
        if of_each is None:
            return gradient
        summed = torch.zeros(x.shape, dtype=gradient.dtype, device=x.device)
        return summed.index_add_(1, torch.tensor(of_each, device=x.device), gradient)


class DistributedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: RankCall, q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse, kept = call.forward(q, k, v)
        ctx.save_for_backward(*kept)
        ctx.call = call
        ctx.shape, ctx.kv_heads = q.shape, k.shape[1]
        ctx.set_materialize_grads(False)
        if not call.needs_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        call: RankCall = ctx.call
        kept = ctx.saved_tensors
        # Ranks exchange the same messages, whichever gradients each of them has.
        if grad_out is None:
            grad_out = kept[0].new_zeros(ctx.shape)
        if grad_lse is None and call.needs_lse:
            grad_lse = grad_out.new_zeros(ctx.shape[:3], dtype=kept[4].dtype)
        return None, *call.backward(grad_out, grad_lse, kept, (ctx.shape[1], ctx.kv_heads))
