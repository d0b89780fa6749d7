"""Gradients of attention: by our kernels on a GPU, by the reference on other devices."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flashwright.operators.backward import differentiate_on_gpu
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import is_empty
from flashwright.runtime.reference import attention_gradients
from flashwright.runtime.tensors import empty_output


def dense_gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
    *,
    config: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k and v, of (batch, heads, rows, head_dim) tensors, and laid out as `empty_output` of them."""
    if not q.is_cuda or is_empty(q.shape, k.shape):
        dq, dk, dv = attention_gradients(grad_out, grad_lse, q, k, v, options=options)
        return laid_out_for(dq, q), laid_out_for(dk, k), laid_out_for(dv, v)
    return differentiate_on_gpu(
        grad_out, grad_lse, q, k, v, out, lse, options, config=config, deterministic=deterministic
    )


def packed_gradients(
    gradients: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    options: AttentionOptions,
    sequences: Callable[[], list[tuple[slice, slice]]],
    *,
    config: str,
    deterministic: bool,
) -> None:
    """Writes those of packed (rows, heads, head_dim) tensors; `sequences` reads where each one lies."""
    if q.is_cuda:
        dq, dk, dv = (batched(gradient) for gradient in gradients)
        differentiate_on_gpu(
            batched(grad_out), grad_lse, batched(q), batched(k), batched(v), batched(out), lse, options,
            config=config, deterministic=deterministic, starts=(starts[0].contiguous(), starts[1].contiguous()),
            packed=(len(starts[0]) - 1, *longest), gradients=(dq, dk, dv),
        )  # fmt: skip
        return
    for gradient in gradients:
        gradient.zero_()
    for rows, keys in sequences():
        if rows.start == rows.stop:
            continue
        sequence = [batched(x) for x in (q[rows], k[keys], v[keys])]
        sequence_grad_lse = None if grad_lse is None else grad_lse[None, :, rows]
        found = attention_gradients(batched(grad_out[rows]), sequence_grad_lse, *sequence, options=options)
        for target, part, gradient in zip(gradients, (rows, keys, keys), found, strict=True):
            target[part] = gradient[0].transpose(0, 1)


def laid_out_for(source: Tensor, x: Tensor) -> Tensor:
    """The values of one tensor with the strides of `empty_output` of another."""
    target = empty_output(x)
    return source if source.stride() == target.stride() else target.copy_(source)


def batched(x: Tensor) -> Tensor:
    """(rows, heads, head_dim) as (1, heads, rows, head_dim)."""
    return x.transpose(0, 1).unsqueeze(0)
