"""`torch.ops.flashwright.*`: attention as PyTorch operators, with fake implementations and gradients.

| operator | what |
|---|---|
| `attention_forward`, `attention_backward` | (batch, heads, rows, head_dim) tensors |
| `attention_varlen_forward`, `attention_varlen_backward` | (rows, heads, head_dim) tensors of packed sequences |

On CUDA the forward pass is the kernel, the backward pass PyTorch's own FlashAttention backward, fed with the kernel's
output and log-sum-exp. What that cannot differentiate (a soft cap, gradients of the log-sum-exp, `deterministic`), and
everything on other devices, is differentiated by recomputing the reference.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from flashwright.attention import (
    chosen_config,
    empty_output,
    is_empty,
    needs_no_dispatcher,
    run_kernel,
    with_vector_rows,
)
from flashwright.reference import attention_gradients, attention_reference
from flashwright.runtime import run_forward
from flashwright.variant import Window

MAX_BACKWARD_HEAD_DIM_OF_SMALL_GPUS = 192
"""Of PyTorch's FlashAttention backward, on GPUs with about 100 KiB of shared memory per block."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    window: Window,
    softcap: float,
    with_lse: bool,
    config: str = "",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attention_forward` with the log-sum-exp that its gradient needs."""
    with_lse = with_lse or _needs_gradient(q, k, v)
    return torch.ops.flashwright.attention_forward(
        q, k, v, scale, window.left, window.right, window.bottom_right, float(softcap), with_lse, config, deterministic
    )


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float | None,
    window: Window,
    softcap: float,
    with_lse: bool,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """`attention_varlen_forward` with the log-sum-exp that its gradient needs."""
    with_lse = with_lse or _needs_gradient(q, k, v)
    direct = not torch.compiler.is_compiling() and needs_no_dispatcher(torch, q, k, v)
    compute = _varlen_kernel if direct else torch.ops.flashwright.attention_varlen_forward
    return compute(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        scale, window.left, window.right, float(softcap), with_lse, deterministic,
    )  # fmt: skip


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


# --- Forward -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("flashwright::attention_forward", mutates_args=())
def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    bottom_right: bool,
    softcap: float,
    with_lse: bool,
    config: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; without `with_lse`, the latter has no elements."""
    window = Window(window_left, window_right, bottom_right)
    if not q.is_cuda:
        out, lse = attention_reference(q, k, v, scale=scale, window=window, softcap=softcap)
        return _copied(out, empty_output(q)), lse.float() if with_lse else _no_lse(q)
    out, lse = run_kernel(
        q, k, v, scale=scale, window=window, softcap=softcap, with_lse=with_lse, config=config or None
    )
    return out, _no_lse(q) if lse is None else lse


@attention_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    bottom_right: bool,
    softcap: float,
    with_lse: bool,
    config: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if with_lse else _no_lse(q)
    return empty_output(q), lse


def _varlen_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    with_lse: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """Output (rows, heads, head_dim) and log-sum-exp (heads, rows) of packed sequences."""
    window = Window(window_left, window_right)
    out = empty_output(q)
    if is_empty(q, k) or len(cu_seqlens_q) < 2:
        lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32, device=q.device)
        return out.zero_(), lse if with_lse else _no_lse(q)
    if not q.is_cuda:
        lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32, device=q.device)
        out.zero_()
        for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
            sequence = [_batched(x) for x in (q[rows], k[keys], v[keys])]
            o, row_lse = attention_reference(*sequence, scale=scale, window=window, softcap=softcap)
            out[rows], lse[:, rows] = o[0].transpose(0, 1), row_lse[0].float()
        return out, lse if with_lse else _no_lse(q)
    config = chosen_config(_batched(q), _batched(k), window, None, lengths=(max_seqlen_q, max_seqlen_k))
    result = run_forward(
        config, *(_batched(with_vector_rows(x)) for x in (q, k, v)),
        scale=scale, window=window, softcap=softcap, return_lse=with_lse, out=_batched(out),
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    return out, result[1][0] if with_lse else _no_lse(q)


attention_varlen_forward = torch.library.custom_op(
    "flashwright::attention_varlen_forward", _varlen_kernel, mutates_args=()
)


@attention_varlen_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    with_lse: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if with_lse else _no_lse(q)
    return empty_output(q), lse


def _batched(x: Tensor) -> Tensor:
    """(rows, heads, head_dim) as (1, heads, rows, head_dim)."""
    return x.transpose(0, 1).unsqueeze(0)


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> list[tuple[slice, slice]]:
    """The rows and keys of each sequence."""
    bounds = []
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        values = starts.tolist()
        if values[0] < 0 or any(end < start for start, end in pairwise(values)):
            raise ValueError(f"{name}: {values} is not allowed; allowed: starts that do not decrease")
        bounds.append([slice(start, end) for start, end in pairwise(values)])
    return list(zip(*bounds, strict=True))


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty((0,), dtype=torch.float32)


def _copied(source: Tensor, target: Tensor) -> Tensor:
    return source if source.stride() == target.stride() else target.copy_(source)


# --- Backward ------------------------------------------------------------------------------------------------------


@torch.library.custom_op("flashwright::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    bottom_right: bool,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    window = Window(window_left, window_right, bottom_right)
    rows, keys, aligned = bottom_right_part(window, q.shape[2], k.shape[2])
    known_window = _pytorch_knows(aligned, rows, keys)
    if known_window and _pytorch_differentiates(q, grad_lse, softcap, deterministic) and not is_empty(q, k):
        gradients = _flash_gradients(grad_out, q, k, v, out, lse, scale, window)
    else:
        gradients = attention_gradients(grad_out, grad_lse, q, k, v, scale=scale, window=window, softcap=softcap)
    dq, dk, dv = (_copied(gradient, _empty_gradient(x)) for gradient, x in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


@attention_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    bottom_right: bool,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradient(q), _empty_gradient(k), _empty_gradient(v)


@torch.library.custom_op("flashwright::attention_varlen_backward", mutates_args=())
def attention_varlen_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    window = Window(window_left, window_right)
    dq, dk, dv = (_empty_gradient(x).zero_() for x in (q, k, v))
    if is_empty(q, k) or len(cu_seqlens_q) < 2:
        return dq, dk, dv
    known_window = _pytorch_knows(window, max_seqlen_q, max_seqlen_k)
    if known_window and _pytorch_differentiates(q, grad_lse, softcap, deterministic):
        packed = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        gradients = _flash_backward(grad_out, q, k, v, out, lse, packed, scale, window)
        for target, gradient in zip((dq, dk, dv), gradients, strict=True):
            target.copy_(gradient)
        return dq, dk, dv
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
        if rows.start == rows.stop:
            continue
        sequence = [_batched(x) for x in (q[rows], k[keys], v[keys])]
        sequence_grad_lse = None if grad_lse is None else grad_lse[None, :, rows]
        gradients = attention_gradients(
            _batched(grad_out[rows]), sequence_grad_lse, *sequence, scale=scale, window=window, softcap=softcap
        )
        for target, part, gradient in zip((dq, dk, dv), (rows, keys, keys), gradients, strict=True):
            target[part] = gradient[0].transpose(0, 1)
    return dq, dk, dv


@attention_varlen_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None,
    window_left: int | None,
    window_right: int | None,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_gradient(q), _empty_gradient(k), _empty_gradient(v)


def _empty_gradient(x: Tensor) -> Tensor:
    return empty_output(x)


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
    scale: float | None,
    window: Window,
) -> tuple[Tensor, Tensor, Tensor]:
    """By PyTorch's FlashAttention backward, whose windows are aligned to the bottom right only."""
    rows, keys, aligned = bottom_right_part(window, q.shape[2], k.shape[2])
    part = [x[:, :, :rows].transpose(1, 2) for x in (grad_out, q, out)]
    grad_part, q_part, out_part = part
    k_part, v_part = (x[:, :, :keys].transpose(1, 2) for x in (k, v))
    gradients = _flash_backward(
        grad_part, q_part, k_part, v_part, out_part, lse[:, :, :rows], (None, None, rows, keys), scale, aligned
    )
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return _extended(dq, q), _extended(dk, k), _extended(dv, v)


def bottom_right_part(window: Window, q_length: int, kv_length: int) -> tuple[int, int, Window]:
    """The first rows and keys outside of which nothing is attended, and the window on them aligned bottom right.

    Row i looks at keys i - left … i + right of a window aligned top left. Only keys before q_length + right, and rows
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


# --- Gradients of the operators --------------------------------------------------------------------------------------


def _save_for_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, *options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    q, k, v, out, lse = ctx.saved_tensors
    scale, left, right, bottom_right, softcap, with_lse, config, deterministic = ctx.options
    if not with_lse:
        grad_lse = None
        out, lse = torch.ops.flashwright.attention_forward(
            q, k, v, scale, left, right, bottom_right, softcap, True, config, deterministic
        )
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    gradients = torch.ops.flashwright.attention_backward(
        grad_out, grad_lse, q, k, v, out, lse, scale, left, right, bottom_right, softcap, deterministic
    )
    return *gradients, *(None for _ in ctx.options)


def _save_for_varlen_backward(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _varlen_backward(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
    max_q, max_k, scale, left, right, softcap, with_lse, deterministic = ctx.options
    if not with_lse:
        grad_lse = None
        out, lse = torch.ops.flashwright.attention_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, scale, left, right, softcap, True, deterministic
        )
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    gradients = torch.ops.flashwright.attention_varlen_backward(
        grad_out, grad_lse, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k,
        scale, left, right, softcap, deterministic,
    )  # fmt: skip
    return *gradients, None, None, *(None for _ in ctx.options)


attention_forward.register_autograd(_backward, setup_context=_save_for_backward)
attention_varlen_forward.register_autograd(_varlen_backward, setup_context=_save_for_varlen_backward)
