"""Gradients as what is timed: the backward alone, or a training step, of any implementation of the forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashwright.problem.flops import BACKWARD, DECODE, FORWARD, TRAIN
from flashwright.workbench.bench.peers import Inputs, Prepared


def prepare_operation(prepare: Callable[[Inputs], Prepared], inputs: Inputs) -> Prepared:
    """An implementation of the forward, made ready for the operation that is timed. It takes keys that lie one after
    the other."""
    if inputs.cache is not None:
        raise ValueError("it takes no paged cache")
    prepared = prepare(inputs)
    return {FORWARD: lambda: prepared, DECODE: lambda: prepared, BACKWARD: lambda: differentiated(prepared, inputs),
            TRAIN: lambda: trained(prepared, inputs)}[inputs.operation]()  # fmt: skip


def differentiated(prepared: Prepared, inputs: Inputs) -> Prepared:
    """The backward alone: a call returns the gradients of q, k and v."""
    return Prepared(_Differentiated(prepared, inputs), kernel=prepared.kernel)


def trained(prepared: Prepared, inputs: Inputs) -> Prepared:
    """A forward and its backward: a call returns the output, and the gradients of q, k and v."""

    def step() -> tuple[Any, ...]:
        out = prepared.called()
        return out, *_gradients(out, inputs)

    return Prepared(step, context=prepared.context, kernel=prepared.kernel)


@dataclass
class _Differentiated:
    """The gradients of one output, which the first call computes: a backward runs on the stream of its forward."""

    prepared: Prepared
    inputs: Inputs
    output: Any = None

    def __call__(self) -> tuple[Any, ...]:
        if self.output is None:
            self.output = self.prepared.output()
        return _gradients(self.output, self.inputs, retain_graph=True)


def _gradients(out: Any, inputs: Inputs, **options: Any) -> tuple[Any, ...]:
    import torch

    return torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.do, **options)


def with_gradients(inputs: Inputs, operation: str) -> Inputs:
    """The same tensors for another operation than the forward: they require gradients, and the output has one."""
    import torch

    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    do = torch.randn_like(q.transpose(1, 2)).transpose(1, 2)
    return Inputs(q, k, v, inputs.causal, operation, do)
