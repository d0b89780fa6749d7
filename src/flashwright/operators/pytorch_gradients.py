"""Gradients by PyTorch's own FlashAttention backward, fed with the kernel's output and log-sum-exp.

What that cannot differentiate (a soft cap, gradients of the log-sum-exp, deterministic sums) is differentiated by
recomputing the reference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashwright.problem.options import AttentionOptions
from flashwright.problem.sequences import sequence_rows
from flashwright.problem.window import Window
from flashwright.runtime.backward_plans import Gradients, Starts
from flashwright.runtime.reference import attention_gradients
from flashwright.runtime.tensors import Packed, empty_output

MAX_BACKWARD_HEAD_DIM_OF_SMALL_GPUS = 192
"""Of PyTorch's FlashAttention backward, on GPUs with about 100 KiB of shared memory per block."""


class PyTorchGradients(NamedTuple):
    """In the place of a `BackwardKind`."""

    options: AttentionOptions
    deterministic: bool

    def run(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None = None,
        starts: Starts | None = None,
        packed: Packed | None = None,
        gradients: Gradients | None = None,
    ) -> Gradients:
        """The gradients of q, k and v, (batch, heads, rows, head_dim), laid out as they are or in the room given."""
        if gradients is None:
            gradients = (empty_output(q), empty_output(k), empty_output(v))
        if starts is not None and packed is not None:
            self._packed(gradients, do, q, k, v, out, lse, dlse, starts, packed)
            return gradients
        rows, keys, aligned = bottom_right_part(self.options.window, q.shape[2], k.shape[2])
        known = _pytorch_knows(aligned, rows, keys)
        if known and _pytorch_differentiates(q, dlse, self.options.softcap, self.deterministic):
            found = _flash_gradients(do, q, k, v, out, lse, self.options)
        else:
            found = attention_gradients(do, dlse, q, k, v, options=self.options)
        for target, gradient in zip(gradients, found, strict=True):
            target.copy_(gradient)
        return gradients

    def _packed(
        self,
        gradients: Gradients,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        starts: Starts,
        packed: Packed,
    ) -> None:
        """Of tensors of batch 1; rows of no sequence are zero."""
        q_starts, kv_starts = starts
        _, *longest = packed
        known = _pytorch_knows(self.options.window, *longest)
        if known and _pytorch_differentiates(q, dlse, self.options.softcap, self.deterministic):
            packing = (q_starts, kv_starts, longest[0], longest[1])
            do, q, k, v, out = (x[0].transpose(0, 1) for x in (do, q, k, v, out))
            lse = lse.reshape(lse.shape[-2:])
            found = _flash_backward(do, q, k, v, out, lse, packing, self.options.scale, self.options.window)
            for target, gradient, each in zip(gradients, found, (q_starts, kv_starts, kv_starts), strict=True):
                # Rows of no sequence are not written there.
                nothing = torch.zeros_like(gradient[:1, :1, :1])
                target[0].transpose(0, 1).copy_(torch.where(_in_a_sequence(each, gradient), gradient, nothing))
            return
        for gradient in gradients:
            gradient.zero_()
        q_rows = sequence_rows("cu_seqlens_q", q_starts, q.shape[2], longest[0])
        kv_rows = sequence_rows("cu_seqlens_k", kv_starts, k.shape[2], longest[1])
        lse_gradients = None if dlse is None else dlse.view(1, *dlse.shape[-2:])
        for rows, keys in zip(q_rows, kv_rows, strict=True):
            if rows.start == rows.stop:
                continue
            part = None if lse_gradients is None else lse_gradients[:, :, rows]
            found = attention_gradients(
                do[:, :, rows], part, q[:, :, rows], k[:, :, keys], v[:, :, keys], options=self.options
            )
            for target, place, gradient in zip(gradients, (rows, keys, keys), found, strict=True):
                target[:, :, place] = gradient


def _in_a_sequence(starts: Tensor, x: Tensor) -> Tensor:
    """Which rows of (rows, heads, head_dim) belong to any sequence; starts are not read by the host."""
    row = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return (row >= starts[0]) & (row < starts[-1])


def _pytorch_differentiates(q: Tensor, grad_lse: Tensor | None, softcap: float, deterministic: bool) -> bool:
    """Whether PyTorch's FlashAttention backward computes this."""
    if not q.is_cuda or grad_lse is not None or softcap or deterministic:
        return False
    capability = torch.cuda.get_device_capability(q.device)
    small = capability in ((8, 6), (8, 7), (8, 9)) or capability[0] >= 12
    return not small or q.shape[-1] <= MAX_BACKWARD_HEAD_DIM_OF_SMALL_GPUS


def _pytorch_knows(window: Window, rows: int, keys: int) -> bool:
    """Whether PyTorch's FlashAttention takes a window aligned to the bottom right for what it is.

    It takes one that reaches as far right as there are keys for no limit at all; with more rows than keys, such a
    window may still cut keys off the first rows.
    """
    return window.right is None or window.right < keys or window.right >= rows - 1


def _flash_gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """By PyTorch's FlashAttention backward, whose windows are aligned to the bottom right only."""
    rows, keys, aligned = bottom_right_part(options.window, q.shape[2], k.shape[2])
    part = [x[:, :, :rows].transpose(1, 2) for x in (grad_out, q, out)]
    grad_part, q_part, out_part = part
    k_part, v_part = (x[:, :, :keys].transpose(1, 2) for x in (k, v))
    gradients = _flash_backward(
        grad_part, q_part, k_part, v_part, out_part, lse[:, :, :rows], (None, None, rows, keys), options.scale, aligned
    )
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return _extended(dq, q), _extended(dk, k), _extended(dv, v)


def bottom_right_part(window: Window, q_length: int, kv_length: int) -> tuple[int, int, Window]:
    """The first rows and keys outside of which nothing is attended, and the window on them aligned bottom right.

    Row i attends to keys i - left … i + right of a window aligned top left. Only keys before q_length + right, and rows
    before kv_length + left, take part; on those, the window is the same moved by the difference of their numbers.
    """
    if window.bottom_right:
        return q_length, kv_length, window
    rows = q_length if window.left is None else min(q_length, kv_length + window.left)
    keys = kv_length if window.right is None else min(kv_length, rows + window.right)
    shift = keys - rows
    left = None if window.left is None else window.left + shift
    right = None if window.right is None else window.right - shift
    return rows, keys, Window(left, right, True)


def _extended(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of all of x, of whose rows only the first took part."""
    if gradient.shape == x.shape:
        return gradient
    whole = empty_output(x).zero_()
    whole[:, :, : gradient.shape[2]] = gradient
    return whole


def _flash_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packed: tuple[Tensor | None, Tensor | None, int, int],
    scale: float | None,
    window: Window,
) -> tuple[Tensor, Tensor, Tensor]:
    """(…, rows, heads, head_dim) tensors. Heads of k and v may be fewer than q's."""
    # There a row without keys has a log-sum-exp of +inf, so that exp(score - lse) is 0 for it.
    lse = torch.where(lse == -math.inf, math.inf, lse).contiguous()
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    no_dropout = torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out, q, k, v, out, lse, *packed, 0.0, False, no_dropout, no_dropout,
        scale=scale, window_size_left=window.left, window_size_right=window.right,
    )  # fmt: skip
