"""Calls with gradients beside the dispatcher: autograd records one function, which launches the kernels itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flashwright.choice.choose import backward_config
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.operators.backward import backward_kind, family_for_gradients
from flashwright.operators.forward import call_kind, run_on_simulator
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import is_empty
from flashwright.runtime.backward import run_backward
from flashwright.runtime.backward_plans import BackwardKind
from flashwright.runtime.tensors import allocator_like, with_vector_rows


class Differentiable(Protocol):
    """A forward and its backward, of q, k and v and perhaps of the starts of packed sequences."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""

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
        """The gradients of q, k and v."""


def record(call: Differentiable, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of tensors that nothing but autograd watches."""
    out, lse = _apply(call, q, k, v, *starts)
    return out, lse


def record_output(call: Differentiable, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> Tensor:
    """The output alone, at less cost."""
    out: Tensor = _apply_for_output(call, q, k, v, *starts)
    return out


class RecordedAttention(torch.autograd.Function):
    """Attention with its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, call: Differentiable, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> Any:
        out, lse = call.forward(q, k, v, *starts)
        ctx.save_for_backward(q, k, v, out, lse, *starts)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        saved = ctx.saved_tensors
        return _differentiate(ctx.call, torch.zeros_like(saved[3]) if grad_out is None else grad_out, grad_lse, saved)


class RecordedOutput(torch.autograd.Function):
    """Attention whose log-sum-exp its backward alone sees."""

    @staticmethod
    def forward(ctx: Any, call: Differentiable, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> Any:
        out, lse = call.forward(q, k, v, *starts)
        ctx.save_for_backward(q, k, v, out, lse, *starts)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        return _differentiate(ctx.call, grad_out, None, ctx.saved_tensors)


# What their `apply` does, less its search for transforms of functorch: there are none.
_apply = super(torch.autograd.Function, RecordedAttention).apply
_apply_for_output = super(torch.autograd.Function, RecordedOutput).apply


def _differentiate(call: Differentiable, grad_out: Tensor, grad_lse: Tensor | None, saved: tuple[Tensor, ...]) -> Any:
    """A gradient, or None, for each argument of the forward; PyTorch drops trailing ones that there are too many of."""
    if torch.is_grad_enabled():  # gradients of the gradients are wanted, too
        with torch.no_grad():
            gradients = call.backward(grad_out, grad_lse, *saved)
        dq, dk, dv = _Gradients.apply(*gradients, *saved[:3], grad_out, grad_lse)
    else:
        dq, dk, dv = call.backward(grad_out, grad_lse, *saved)
    return None, dq, dk, dv, None, None


class _Gradients(torch.autograd.Function):
    """Gradients that depend on other tensors, which is not differentiated."""

    @staticmethod
    def forward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *others: Tensor | None) -> Any:
        return dq.view_as(dq), dk.view_as(dk), dv.view_as(dv)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            "attention: the kernels compute no gradients of gradients; backend='reference' computes them"
        )


class RecordedKind:
    """Calls on (batch, heads, rows, head_dim) tensors that differ in their shapes, strides and addresses only."""

    MOST_CALLS = 4096

    def __init__(
        self,
        options: AttentionOptions,
        dtype: DType,
        device_index: int,
        config: KernelConfig | str | None = None,
        family: str | None = None,
        row_invariant: bool = False,
        deterministic: bool = False,
    ) -> None:
        self._forward = call_kind(
            options, dtype, device_index, True, config, family, row_invariant, decodes_few_rows=False
        )
        family = family_for_gradients(config, family)
        self._ordered = backward_kind(options, dtype, device_index, family, True)
        self._usual = self._ordered if deterministic else backward_kind(options, dtype, device_index, family)
        self._calls: dict[tuple[Any, ...], RecordedCall] = {}
        """By shape and strides of q, k and v."""

    def run(self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Any:
        """The output, or it and the log-sum-exp, with gradients; None for tensors that are empty, and for values of a
        head dimension of their own. Raises `ValueError` for what is not attention's."""
        index = self._forward.device_index
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.run(q, k, v, with_lse)
        layout = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
        call = self._calls.get(layout) or self._new_call(layout, q, k, v)
        if call is None:
            return None
        return _apply(call, q, k, v) if with_lse else _apply_for_output(call, q, k, v)

    def _new_call(self, layout: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> RecordedCall | None:
        kind = self._forward
        out = kind.torch.empty_like(q)
        arrangement = kind.arrangement(q, k, v, out)
        if arrangement is None:
            return None
        if len(self._calls) >= self.MOST_CALLS:
            self._calls.clear()
        call = self._calls[layout] = RecordedCall(arrangement, allocator_like(out), self._usual, self._ordered)
        return call


class RecordedCall:
    """A call on tensors of one layout, and its backward, whatever the layout of the gradient it is given."""

    __slots__ = ("_arrangement", "_new_output", "_ordered", "_usual")

    def __init__(
        self, arrangement: Any, new_output: Callable[[], Tensor], usual: BackwardKind, ordered: BackwardKind
    ) -> None:
        """`new_output` allocates on the current GPU, which is the tensors' own. `ordered` computes gradients where
        PyTorch is told to be deterministic."""
        self._arrangement, self._new_output, self._usual, self._ordered = arrangement, new_output, usual, ordered

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._arrangement.run(q, k, v, self._new_output())
        return found

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
        kind = self._ordered if torch.are_deterministic_algorithms_enabled() else self._usual
        return kind.run(grad_out, q, k, v, out, lse, None if grad_lse is None else grad_lse.contiguous())


class SimulatedCall(NamedTuple):
    """A call on CPU tensors, both of whose passes are simulated."""

    options: AttentionOptions
    config: KernelConfig | str | None = None
    family: str | None = None
    row_invariant: bool = False
    deterministic: bool = False

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, with gradients."""
        out, lse = RecordedAttention.apply(self, q, k, v)
        return out, lse

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = run_on_simulator(
            q, k, v, self.options, with_lse=True, config=self.config, family=self.family,
            row_invariant=self.row_invariant,
        )  # fmt: skip
        return out, lse

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
        sums: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients, or with `sums`, which are fp32, those with the gradients added to them."""
        if is_empty(q.shape, k.shape):
            return sums or (torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v))
        options = self.options
        occasion = Occasion.of(DType.parse(str(q.dtype)), q.shape[3], options.window, q.shape[2], k.shape[2], gpu=None)
        chosen = backward_config(
            occasion,
            family=family_for_gradients(self.config, self.family),
            deterministic=self.deterministic,
        )
        do, q, k, v, out = (with_vector_rows(x.detach()) for x in (grad_out, q, k, v, out))
        dlse = None if grad_lse is None else grad_lse.detach()
        return run_backward(
            chosen, do, q, k, v, out, lse.detach(), dlse=dlse, scale=options.scale, window=options.window,
            softcap=options.softcap, sums=sums, device="simulator",
        )  # fmt: skip
