"""A program of a user's own, for type checkers: what is right is accepted, and every line of `mistakes` is refused.

`make lint` runs mypy and pyright on it, with the types of PyTorch and NumPy. Both report an ignored line that has no
error. Nothing here is executed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import flashwright as fw


def on_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool) -> torch.Tensor:
    out: torch.Tensor = fw.attention(q, k, v)
    out = fw.attention(q, k, v, causal=True, window=(1024, 0), scale=0.1, softcap=30.0, row_invariant=True)
    out = fw.attention(q, k, v, causal="top-left", backend="gpu", return_lse=False)
    out, lse = fw.attention(q, k, v, return_lse=True)
    both: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = fw.attention(q, k, v, return_lse=with_lse)
    out = fw.attention(q, k, v, config="(BF16, 128, 64, 64, 4): async+swizzled+load_0_2_2_tiles")
    out = fw.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out + lse[..., None] if isinstance(both, torch.Tensor) else both[0]


def on_arrays(q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    out, lse = fw.attention(q, k, v, backend="simulator", return_lse=True)
    return np.append(out, lse[..., None], axis=-1)


def configs_of_every_family(q: torch.Tensor, config: fw.FlashForwardKernelConfig) -> None:
    fw.attention(q, q, q, config=config)
    fw.attention(q, q, q, config=fw.parse_hopper_config("hopper (BF16, 128, 128, 128): stages_2"))
    registers: int = fw.compile_kernel(config, "sm_80").registers
    source: str = fw.choice(q, q, causal="bottom-right", gpu="h200").source
    fw.warm_up(128, torch.bfloat16, causal=True, grouped=True, training=True)
    print(registers, source)


def mistakes(q: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    fw.attention(q, q)  # type: ignore  # v is missing
    fw.attention(q, q, q, causal="bottom-left")  # type: ignore  # no such alignment
    fw.attention(q, q, q, backend="cpu")  # type: ignore  # no such backend
    fw.attention(q, q, q, window=64)  # type: ignore  # not a pair
    fw.attention(q, q, q, True)  # type: ignore  # options have names
    fw.attention(q, q, q, dropout=0.1)  # type: ignore  # no such option
    fw.attention(q, q, array)  # type: ignore  # two kinds of tensors
    print(fw.attention(q, q, q).lse)  # type: ignore  # a tensor has no such attribute
    number: float = fw.attention(q, q, q)  # type: ignore  # a tensor is no number
    print(fw.attention(q, q, q, return_lse=True).shape)  # type: ignore  # two tensors
    fw.choice(q, q, causal="left")  # type: ignore  # no such alignment
    print(number)
