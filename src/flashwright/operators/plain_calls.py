"""Which part PyTorch has in a call: gradients, tracing, modes, wrapped tensors."""

from __future__ import annotations

import sys
from typing import Any

DISPATCHED, LAUNCHED, RECORDED = range(3)
"""What a call goes through: PyTorch's dispatcher, which is 0; nothing; autograd, which records it."""


def way_of_call(q: Any, k: Any, v: Any) -> int:
    """A call on CUDA tensors needs no dispatcher if nothing watches it: no mode, no fake, traced, wrapped or batched
    tensors. If there are gradients to compute, it is recorded."""
    torch = sys.modules.get("torch")
    if torch is None:  # then there are no tensors either
        return DISPATCHED
    plain = torch.Tensor
    if (
        not torch.compiler.is_compiling()
        and q.__class__ is plain
        and k.__class__ is plain
        and v.__class__ is plain
        and q.is_cuda
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch.autograd.forward_ad._current_level < 0
    ):
        needs_gradient = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return RECORDED if needs_gradient else LAUNCHED
    return DISPATCHED
