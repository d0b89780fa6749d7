"""Calls with gradients beside the dispatcher: autograd records one function, which launches the kernels itself."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flashwright.choice.choose import backward_config
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.operators.backward import backward_kind, family_for_gradients
from flashwright.operators.forward import call_kind, run_on_simulator
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import length_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import is_empty
from flashwright.runtime.backward import run_backward
from flashwright.runtime.tensors import with_vector_rows


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


class RecordedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Differentiable, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> Any:
        out, lse = call.forward(q, k, v, *starts)
        ctx.save_for_backward(q, k, v, out, lse, *starts)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        q, k, v, out, lse, *starts = ctx.saved_tensors
        given = torch.zeros_like(out) if grad_out is None else grad_out
        if torch.is_grad_enabled():  # gradients of the gradients are wanted, too
            with torch.no_grad():
                gradients = ctx.call.backward(given, grad_lse, q, k, v, out, lse, *starts)
            gradients = _Gradients.apply(*gradients, q, k, v, grad_out, grad_lse)
        else:
            gradients = ctx.call.backward(given, grad_lse, q, k, v, out, lse, *starts)
        return None, *gradients, *(None for _ in starts)


# What `RecordedAttention.apply` does, less its search for transforms of functorch: there are none.
_apply = super(torch.autograd.Function, RecordedAttention).apply


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

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of tensors that are not empty, with gradients."""
        return record(self, q, k, v)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *starts: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self._forward.run(q, k, v)
        assert lse is not None
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_empty(q.shape, k.shape):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        options = self.options
        occasion = Occasion(
            DType.parse(str(q.dtype)), q.shape[3], options.window.right is not None, length_bucket(q.shape[2]),
            length_bucket(k.shape[2]), None,
        )  # fmt: skip
        chosen = backward_config(
            occasion,
            family=family_for_gradients(self.config, self.family),
            deterministic=self.deterministic,
        )
        do, q, k, v, out = (with_vector_rows(x.detach()) for x in (grad_out, q, k, v, out))
        dlse = None if grad_lse is None else grad_lse.detach()
        return run_backward(
            chosen, do, q, k, v, out, lse.detach(), dlse=dlse, scale=options.scale, window=options.window,
            softcap=options.softcap, device="simulator",
        )  # fmt: skip
