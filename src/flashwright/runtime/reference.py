"""Attention in plain PyTorch: the definition, in fp32 or better, for CPU tensors, for tests and for gradients.

Half-precision inputs are computed in fp32, others in their own precision; only the results are rounded. Scores are
formed for a limited number of rows at a time, so memory does not grow with the product of the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window

if TYPE_CHECKING:
    import torch

NO_OPTIONS = AttentionOptions()
SCORES_AT_A_TIME = 2**25
"""Elements of the score matrix, over all batches and heads, that are formed together."""


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    options: AttentionOptions = NO_OPTIONS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output in q's dtype, and the log-sum-exp of each row's scores in fp32 or better.

    (batch, heads, rows, head_dim) tensors; q may have a multiple of k's and v's heads. Differentiable, twice.
    """
    import torch

    if q.numel() == 0:
        empty = q + 0 * (k.sum() + v.sum())  # the gradients of k and v are 0, not missing
        return empty, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    problem = _Problem.of(q, k, v, options)
    outputs, lses = [], []
    for rows in problem.row_blocks():
        scores, _ = problem.scores(rows)
        weights, lse = _softmax(scores)
        outputs.append(problem.with_heads(problem.grouped(weights) @ problem.v))
        lses.append(lse.flatten(1, 2))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return out.to(q.dtype), lses[0] if len(lses) == 1 else torch.cat(lses, dim=2)


def attention_gradients(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    options: AttentionOptions = NO_OPTIONS,
    lse: torch.Tensor | None = None,
    row_dot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v by the chain rule, softmax recomputed; needs no autograd.

    If k and v are only some of the keys and values that rows attend to, `lse` is the log-sum-exp of the scores of all,
    and `row_dot` each row's sum of its output times the output's gradient.
    """
    import torch

    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    problem = _Problem.of(q, k, v, options)
    grad_q = torch.empty_like(problem.q)
    grad_k, grad_v = torch.zeros_like(problem.k), torch.zeros_like(problem.v)
    grad_out = problem.split_heads(grad_out.to(problem.q.dtype))
    for rows in problem.row_blocks():
        scores, cap_slope = problem.scores(rows)
        weights = _softmax(scores)[0] if lse is None else _weights(scores, problem.rows_of(lse, rows))
        block = problem.grouped(grad_out[:, :, :, rows])
        grad_v += problem.grouped(weights).mT @ block
        grad_weights = (block @ problem.v.mT).view(weights.shape)
        # d softmax: each weight moves with its own gradient, less the row's weighted mean of all.
        if row_dot is None:
            pull = grad_weights - (weights * grad_weights).sum(-1, keepdim=True)
        else:
            pull = grad_weights - problem.rows_of(row_dot, rows)
        if grad_lse is not None:
            pull = pull + problem.rows_of(grad_lse, rows)
        grad_scores = weights * pull * problem.scale
        if cap_slope is not None:
            grad_scores = grad_scores * cap_slope
        flat = problem.grouped(grad_scores)
        grad_q[:, :, :, rows] = (flat @ problem.k).view(*grad_scores.shape[:-1], -1)
        grad_k += flat.mT @ problem.grouped(problem.q[:, :, :, rows])
    return grad_q.flatten(1, 2).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def visible_keys(
    window: Window, q_length: int, kv_length: int, *, rows: slice | None = None, device: torch.device | None = None
) -> torch.Tensor | None:
    """Which keys each row attends to, (rows, keys) of bool; None: every row to all."""
    import torch

    if window.left is None and window.right is None:
        return None
    first, last = (0, q_length) if rows is None else (rows.start, rows.stop)
    shift = kv_length - q_length if window.bottom_right else 0
    row = torch.arange(first, last, device=device).unsqueeze(1) + shift
    key = torch.arange(kv_length, device=device)
    if window.right is None:
        assert window.left is not None
        return key >= row - window.left
    visible = key <= row + window.right
    return visible if window.left is None else visible & (key >= row - window.left)


@dataclass(frozen=True)
class _Problem:
    """Inputs in the precision that is computed in; q's heads are (kv_heads, heads that share one of k's)."""

    q: torch.Tensor
    """(batch, kv_heads, group, rows, head_dim)"""
    k: torch.Tensor
    v: torch.Tensor
    options: AttentionOptions

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> _Problem:
        import torch

        precision = torch.promote_types(q.dtype, torch.float32)
        heads = (k.shape[1], q.shape[1] // k.shape[1])
        return cls(q.to(precision).unflatten(1, heads), k.to(precision), v.to(precision), options)

    @property
    def scale(self) -> float:
        return self.options.scale_of(self.q.shape[-1])

    def row_blocks(self) -> Iterator[slice]:
        import torch

        batch, kv_heads, group, q_length, _ = self.q.shape
        at_a_time = q_length
        if not torch.compiler.is_compiling():  # a graph of all the blocks would be long for nothing
            row_scores = batch * kv_heads * group * self.k.shape[2]
            at_a_time = max(1, min(q_length, SCORES_AT_A_TIME // max(row_scores, 1)))
        if at_a_time >= q_length:
            yield slice(0, q_length)
            return
        for first in range(0, q_length, at_a_time):
            yield slice(first, min(first + at_a_time, q_length))

    def scores(self, rows: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scaled, capped and masked scores of some rows; and the slope of the cap, if there is one."""
        import torch

        q = self.q[:, :, :, rows]
        scores = (self.grouped(q) @ self.k.mT * self.scale).view(*q.shape[:-1], self.k.shape[2])
        slope = None
        softcap = self.options.softcap
        if softcap:
            tanh = torch.tanh(scores / softcap)
            scores, slope = tanh * softcap, 1 - tanh * tanh
        visible = visible_keys(self.options.window, self.q.shape[3], self.k.shape[2], rows=rows, device=q.device)
        return scores if visible is None else scores.masked_fill(~visible, -math.inf), slope

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, self.q.shape[1:3])

    def rows_of(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        """A number of each row, (batch, heads, rows), for some rows beside their scores."""
        return self.split_heads(x.to(self.q.dtype).unsqueeze(-1))[:, :, :, rows]

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """The heads of a group as further rows, so that they share one product with k or v."""
        return x.flatten(2, 3)

    def with_heads(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `grouped` with q's heads in one dimension."""
        return x.unflatten(2, (self.q.shape[2], -1)).flatten(1, 2)


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and log-sum-exp; a row of only -inf, or of no keys, has weights 0 and log-sum-exp -inf."""
    import torch

    if scores.shape[-1] == 0:
        maximum = scores.new_zeros(*scores.shape[:-1], 1)
    else:
        maximum = scores.detach().amax(-1, keepdim=True)
        maximum = maximum.masked_fill(maximum == -math.inf, 0)
    exponentials = torch.exp(scores - maximum)
    total = exponentials.sum(-1, keepdim=True)
    weights = exponentials / total.masked_fill(total == 0, 1)
    return weights, (maximum + torch.log(total)).squeeze(-1)


def _weights(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Of rows whose log-sum-exp is known; 0 where it is -inf."""
    import torch

    return torch.exp(scores - lse).masked_fill(lse == -math.inf, 0)
