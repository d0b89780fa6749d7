"""Checks of PyTorch's tensors that need no kernel."""

from __future__ import annotations

from typing import Any

from flashwright.runtime.devices import require_torch


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raises for tensors that are not of one device and one floating-point dtype."""
    torch = require_torch("attention")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}; all tensors must be on one device")
        if not tensor.is_floating_point():
            raise ValueError(f"{name}: dtype {tensor.dtype} is not allowed; allowed: floating point")
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {tensor.dtype} differs from q's, {q.dtype}")


def check_kernel_dtype(q: Any) -> None:
    torch = require_torch("attention")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"q: dtype {q.dtype} is not allowed; allowed: torch.float16, torch.bfloat16 (backend='reference' computes "
            "any floating point)"
        )
