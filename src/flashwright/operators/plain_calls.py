"""Whether PyTorch has a part in a call: gradients, tracing, modes, wrapped tensors."""

from __future__ import annotations

import sys
from typing import Any


def is_plain_call(q: Any, k: Any, v: Any) -> bool:
    """Whether nothing watches a call on CUDA tensors but the GPU: no gradient, no mode, no fake, traced, wrapped or
    batched tensors. Such a call needs no dispatcher."""
    torch = sys.modules.get("torch")
    if torch is None:  # then there are no tensors either
        return False
    plain = torch.Tensor
    return (
        not torch.compiler.is_compiling()
        and q.__class__ is plain
        and k.__class__ is plain
        and v.__class__ is plain
        and q.is_cuda
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch.autograd.forward_ad._current_level < 0
    )
