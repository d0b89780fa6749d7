"""`torch.ops.flashwright.*`: attention as PyTorch operators, with fake implementations and gradients.

| operator | what |
|---|---|
| `attention_forward`, `attention_backward` | (batch, heads, rows, head_dim) tensors |
| `attention_varlen_forward`, `attention_varlen_backward` | (rows, heads, head_dim) tensors of packed sequences |
| `attention_decode` | (batch, heads, rows, head_dim) queries, and a range of a cache's keys for each sequence |

On CUDA both passes are kernels, on other devices the reference.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashwright.operators.decode import decode
from flashwright.operators.forward import run_on_gpu
from flashwright.operators.gradients import batched, dense_gradients, laid_out_for, packed_gradients
from flashwright.operators.plain_calls import DISPATCHED, RECORDED, way_of_call
from flashwright.operators.recorded import record, record_output
from flashwright.problem.options import AttentionOptions
from flashwright.problem.sequences import sequence_rows
from flashwright.problem.shapes import is_empty
from flashwright.problem.window import Window
from flashwright.runtime.decode_plans import CacheTensors
from flashwright.runtime.reference import attention_reference
from flashwright.runtime.tensors import empty_output, with_vector_rows

_REQUEST = (
    "float? scale, SymInt? window_left, SymInt? window_right, bool bottom_right, float softcap, bool with_lse, "
    "str config, bool deterministic"
)


class Request(NamedTuple):
    """What an operator computes of its tensors; flattened, the tail of every operator's arguments."""

    options: AttentionOptions
    with_lse: bool = False
    config: str = ""
    """The short form of the config to use; empty: the one chosen for the problem."""
    deterministic: bool = False

    def flat(self) -> tuple[Any, ...]:
        window, options = self.options.window, self.options
        return (
            options.scale, window.left, window.right, window.bottom_right, float(options.softcap), self.with_lse,
            self.config, self.deterministic,
        )  # fmt: skip

    @classmethod
    def of(cls, flat: tuple[Any, ...]) -> Request:
        scale, left, right, bottom_right, softcap, *rest = flat
        return cls(AttentionOptions(Window(left, right, bottom_right), scale, softcap), *rest)


def forward(q: Tensor, k: Tensor, v: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """`attention_forward` with the log-sum-exp that its gradient needs."""
    request = _with_lse_for_gradient(request, q, k, v)
    out, lse = torch.ops.flashwright.attention_forward(q, k, v, *request.flat())
    return out, lse


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int], request: Request
) -> tuple[Tensor, Tensor | None]:
    """`attention_varlen_forward` with the log-sum-exp that its gradient needs; None in its place, where it is recorded
    and was not requested."""
    wants_lse = request.with_lse
    request = _with_lse_for_gradient(request, q, k, v)
    way = way_of_call(q, k, v)
    if way == RECORDED:
        call = PackedCall(longest, request)
        return record(call, q, k, v, *starts) if wants_lse else (record_output(call, q, k, v, *starts), None)
    compute = torch.ops.flashwright.attention_varlen_forward if way == DISPATCHED else _varlen_forward
    out, lse = compute(q, k, v, *starts, *longest, *request.flat())
    return out, lse


def decode_ranges(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, ends: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of each sequence to its keys [begin, end), masks aligned to the last of them; int32 tensors on the
    device. Without gradients."""
    request = Request(options)
    is_plain = way_of_call(q, k, v) != DISPATCHED
    compute = _decode_forward if is_plain else torch.ops.flashwright.attention_decode
    out: Tensor = compute(q, k, v, begins, ends, *request.flat())
    return out


class PackedCall(NamedTuple):
    """What the operators of packed sequences compute, beside the dispatcher."""

    longest: tuple[int, int]
    request: Request

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> tuple[Tensor, Tensor]:
        q_starts, kv_starts = starts
        return _varlen_forward(q, k, v, q_starts, kv_starts, *self.longest, *self.request.flat())

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *starts: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_starts, kv_starts = starts
        return _varlen_backward(
            grad_out, grad_lse, q, k, v, out, lse, q_starts, kv_starts, *self.longest, *self.request.flat()
        )


def _with_lse_for_gradient(request: Request, *tensors: Tensor) -> Request:
    if request.with_lse or not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return request
    return request._replace(with_lse=True)


# --- Forward -------------------------------------------------------------------------------------------------------


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; without `with_lse`, the latter has no elements."""
    request = Request.of(flat)
    if not q.is_cuda:
        out, lse = attention_reference(q, k, v, options=request.options)
        return laid_out_for(out, q), lse.float() if request.with_lse else _no_lse(q)
    # Whether autograd records the operator is not known here: it needs the log-sum-exp then, and the forward's own.
    out, lse = run_on_gpu(
        q, k, v, request.options, with_lse=request.with_lse, config=request.config or None,
        decodes_few_rows=not request.with_lse,
    )  # fmt: skip
    return out, _no_lse(q) if lse is None else lse


def _dense_fake(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if Request.of(flat).with_lse else _no_lse(q)
    return empty_output(q), lse


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor, max_q: int, max_k: int, *flat: Any
) -> tuple[Tensor, Tensor]:
    """Output (rows, heads, head_dim) and log-sum-exp (heads, rows) of packed sequences."""
    request = Request.of(flat)
    options, with_lse = request.options, request.with_lse
    if q.is_cuda and not is_empty(q.shape, k.shape) and len(q_starts) > 1:
        starts, packed = (q_starts.contiguous(), kv_starts.contiguous()), (len(q_starts) - 1, max_q, max_k)
        out, lse = run_on_gpu(
            batched(q), batched(k), batched(v), options, with_lse=with_lse, config=request.config or None,
            starts=starts, packed=packed,
        )  # fmt: skip
        return out[0].transpose(0, 1), _no_lse(q) if lse is None else lse[0]
    out = empty_output(q).zero_()
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32, device=q.device)
    if not q.is_cuda:
        for rows, keys in packed_sequences(q, k, q_starts, kv_starts, max_q, max_k):
            sequence = [batched(x) for x in (q[rows], k[keys], v[keys])]
            o, row_lse = attention_reference(*sequence, options=options)
            out[rows], lse[:, rows] = o[0].transpose(0, 1), row_lse[0].float()
    return out, lse if with_lse else _no_lse(q)


def _varlen_fake(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, kv_starts: Tensor, max_q: int, max_k: int, *flat: Any
) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if Request.of(flat).with_lse else _no_lse(q)
    return empty_output(q), lse


def _decode_forward(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, ends: Tensor, *flat: Any) -> Tensor:
    if is_empty(q.shape, k.shape):
        return empty_output(q).zero_()
    request, cache = Request.of(flat), CacheTensors(ends.contiguous(), begins.contiguous())
    if q.is_cuda:
        k, v = with_vector_rows(k), with_vector_rows(v)
    out, _ = decode(q, k, v, request.options, cache)
    return out


def _decode_fake(q: Tensor, k: Tensor, v: Tensor, begins: Tensor, ends: Tensor, *flat: Any) -> Tensor:
    return empty_output(q)


def packed_sequences(
    q: Tensor, k: Tensor, q_starts: Tensor, kv_starts: Tensor, max_q: int, max_k: int
) -> list[tuple[slice, slice]]:
    """The rows and keys of each sequence; reads the starts."""
    if len(q_starts) < 2:
        return []
    rows = sequence_rows("cu_seqlens_q", q_starts, q.shape[0], max_q)
    keys = sequence_rows("cu_seqlens_k", kv_starts, k.shape[0], max_k)
    return list(zip(rows, keys, strict=True))


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty((0,), dtype=torch.float32)


# --- Backward ------------------------------------------------------------------------------------------------------


def _dense_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *flat: Any
) -> tuple[Tensor, Tensor, Tensor]:
    request = Request.of(flat)
    return dense_gradients(
        grad_out, grad_lse, q, k, v, out, lse, request.options, config=request.config,
        deterministic=request.deterministic,
    )  # fmt: skip


def _varlen_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_starts: Tensor,
    kv_starts: Tensor,
    max_q: int,
    max_k: int,
    *flat: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    request = Request.of(flat)
    dq, dk, dv = (empty_output(x) for x in (q, k, v))
    if is_empty(q.shape, k.shape) or len(q_starts) < 2:
        return dq.zero_(), dk.zero_(), dv.zero_()
    packed_gradients(
        (dq, dk, dv), grad_out, grad_lse, q, k, v, out, lse, (q_starts, kv_starts), (max_q, max_k), request.options,
        lambda: packed_sequences(q, k, q_starts, kv_starts, max_q, max_k), config=request.config,
        deterministic=request.deterministic,
    )  # fmt: skip
    return dq, dk, dv


def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_output(q), empty_output(k), empty_output(v)


# --- Operators -----------------------------------------------------------------------------------------------------

_INPUTS = "Tensor q, Tensor k, Tensor v"
_STARTS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_BACKWARD_INPUTS = f"Tensor grad_out, Tensor? grad_lse, {_INPUTS}, Tensor out, Tensor lse"
_TWO, _THREE = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor)"


def _operator(name: str, compute: Any, fake: Any, schema: str) -> Any:
    operator = torch.library.custom_op(f"flashwright::{name}", compute, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    return operator


attention_forward = _operator("attention_forward", _dense_forward, _dense_fake, f"({_INPUTS}, {_REQUEST}) -> {_TWO}")
attention_varlen_forward = _operator(
    "attention_varlen_forward", _varlen_forward, _varlen_fake, f"({_INPUTS}, {_STARTS}, {_REQUEST}) -> {_TWO}"
)
attention_decode = _operator(
    "attention_decode",
    _decode_forward,
    _decode_fake,
    f"({_INPUTS}, Tensor begins, Tensor ends, {_REQUEST}) -> Tensor",
)
attention_backward = _operator(
    "attention_backward", _dense_backward, _backward_fake, f"({_BACKWARD_INPUTS}, {_REQUEST}) -> {_THREE}"
)
attention_varlen_backward = _operator(
    "attention_varlen_backward",
    _varlen_backward,
    _backward_fake,
    f"({_BACKWARD_INPUTS}, {_STARTS}, {_REQUEST}) -> {_THREE}",
)


# --- Gradients of the operators --------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Of either forward operator: tensors first, then what is passed on as it is."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    ctx.save_for_backward(*tensors, *output)
    ctx.arguments = inputs[len(tensors) :]
    ctx.set_materialize_grads(False)


def _differentiate(forward_operator: Any, backward_operator: Any, ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    *inputs, out, lse = ctx.saved_tensors
    q, k, v, *starts = inputs
    longest = ctx.arguments[: len(starts)]
    request = Request.of(ctx.arguments[len(longest) :])
    if not request.with_lse:
        grad_lse, request = None, request._replace(with_lse=True)
        out, lse = forward_operator(*inputs, *longest, *request.flat())
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    gradients = backward_operator(grad_out, grad_lse, q, k, v, out, lse, *starts, *longest, *request.flat())
    return *gradients, *(None for _ in starts), *(None for _ in ctx.arguments)


def _dense_autograd(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    operators = torch.ops.flashwright
    return _differentiate(operators.attention_forward, operators.attention_backward, ctx, grad_out, grad_lse)


def _varlen_autograd(ctx: Any, grad_out: Any, grad_lse: Any) -> Any:
    operators = torch.ops.flashwright
    return _differentiate(
        operators.attention_varlen_forward, operators.attention_varlen_backward, ctx, grad_out, grad_lse
    )


attention_forward.register_autograd(_dense_autograd, setup_context=_save)
attention_varlen_forward.register_autograd(_varlen_autograd, setup_context=_save)
