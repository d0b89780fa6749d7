"""What the tests on a GPU share: problems in its memory, the truth about them, and how accurate PyTorch is on them.

"As accurately as PyTorch" is at most 1.3 times the error, against float64, of PyTorch's FlashAttention on the same
inputs; where that does not compute a problem, of PyTorch's memory-efficient kernel, or of the eager computation in the
same dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from attention_cases import relative_error, relative_errors
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashwright.choice.choose import chosen_config
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.launch import forward_variant
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window
from flashwright.runtime.compiling import compile_all
from flashwright.runtime.devices import gpu_model
from flashwright.runtime.reference import attention_gradients, attention_reference, visible_keys

ERROR_OVER_PYTORCH = 1.3
ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative, in the Frobenius norm: a few roundings of P and O to the dtype."""
TORCH_DTYPES = {DType.FP16: torch.float16, DType.BF16: torch.bfloat16}


# --- This machine ----------------------------------------------------------------------------------------------------


def this_gpu() -> GPUModel:
    return gpu_model(torch.cuda.current_device())


def this_arch() -> str:
    return this_gpu().arch


# --- Problems --------------------------------------------------------------------------------------------------------


def some(
    dtype: Any = None,
    q_shape: tuple[int, ...] = (2, 4, 300, 64),
    kv_shape: tuple[int, ...] = (2, 2, 500, 64),
    *,
    grad: bool = False,
    seed: int = 3,
) -> tuple[Any, Any, Any]:
    """Standard normal q, k and v."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(s, generator=generator, device="cuda").to(dtype or torch.bfloat16).requires_grad_(grad)
        for s in (q_shape, kv_shape, kv_shape)
    )
    return q, k, v


def options_of(options: dict[str, Any]) -> AttentionOptions:
    """The keyword arguments of `attention()` as one value."""
    return AttentionOptions.of(**options)


def window_of(options: dict[str, Any]) -> Window:
    return options_of(options).window


def starts_of(lengths: Sequence[int], first: int = 0) -> Any:
    """cu_seqlens of sequences of these lengths, on the GPU."""
    return torch.tensor([*accumulate(lengths, initial=first)], device="cuda", dtype=torch.int32)


def slices_of(lengths: Sequence[int], first: int = 0) -> list[slice]:
    """The rows of each."""
    return [slice(*ends) for ends in pairwise(accumulate(lengths, initial=first))]


def poison(like: Any, count: int = 4) -> None:
    """Fills memory that the next tensors of this size will get with NaN."""
    spoilt = [torch.full_like(like, math.nan, memory_format=torch.contiguous_format) for _ in range(count)]
    spoilt += [torch.full(like.shape[:-1], math.nan, dtype=torch.float32, device=like.device) for _ in range(count)]
    del spoilt


# --- Kernels ---------------------------------------------------------------------------------------------------------


def config_for(
    q: Any, k: Any, options: dict[str, Any], family: str | None, lengths: tuple[int, int] | None = None
) -> KernelConfig:
    """What `attention()` uses for these tensors, or for packed sequences of up to these lengths."""
    rows, keys = lengths or (q.shape[2], k.shape[2])
    return chosen_config(
        DType.parse(str(q.dtype)), q.shape[3], window_of(options), rows, keys, gpu=this_gpu(), family=family
    )


def compile_with_and_without_lse(
    config: KernelConfig, q: Any, k: Any, options: AttentionOptions, *, packed: bool = False
) -> None:
    """Both kernels at the same time, into the cache of the run; a call would compile one after the other."""
    variant = forward_variant(
        config, options, head_dim=q.shape[3], grouped_heads=q.shape[1] != k.shape[1], packed=packed, returns_lse=True
    )
    pair = [(config, variant), (config, replace(variant, returns_lse=False))]
    compile_all(pair, this_arch(), progress=False)


# --- The truth -------------------------------------------------------------------------------------------------------


def truth(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Output and log-sum-exp in float64."""
    return attention_reference(q.double(), k.double(), v.double(), options=options_of(options))


def packed_truth(
    q: Any, k: Any, v: Any, q_starts: Any, kv_starts: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (1, heads, rows, head_dim) tensors that hold sequences one after the other; rows of none are 0, -inf."""
    out = torch.zeros_like(q, dtype=torch.float64, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    for rows, keys in zip(pairwise(q_starts.tolist()), pairwise(kv_starts.tolist()), strict=True):
        row, key = slice(*rows), slice(*keys)
        if row.start < row.stop and key.start < key.stop:
            out[:, :, row], lse[:, :, row] = truth(q[:, :, row], k[:, :, key], v[:, :, key], options)
    return out, lse


def by_pytorch(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """The same by PyTorch's fastest kernel that computes it; rows without keys are 0."""
    window, scale = window_of(options), options.get("scale")
    same_corner = window.bottom_right or q.shape[2] == k.shape[2]
    if not options.get("softcap") and same_corner:
        out, *_ = torch.ops.aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0, False, False,
            scale=scale, window_size_left=window.left, window_size_right=window.right,
        )  # fmt: skip
        return out.transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    visible = visible_keys(window, q.shape[2], k.shape[2], device=q.device)
    if not options.get("softcap"):
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    else:
        cap = options["softcap"]
        scores = cap * torch.tanh((q @ k.mT).float() * ((scale or q.shape[3] ** -0.5) / cap))
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        out = torch.softmax(scores, dim=-1).to(q.dtype) @ v
    if visible is not None:
        out = out.masked_fill(~visible.any(dim=-1, keepdim=True), 0)
    return out


# --- Gradients -------------------------------------------------------------------------------------------------------


def true_gradients(q: Any, k: Any, v: Any, grad: Any, options: dict[str, Any], grad_lse: Any = None) -> tuple[Any, ...]:
    """In float64."""
    doubles = [x.detach().double() for x in (q, k, v)]
    return attention_gradients(grad.double(), grad_lse, *doubles, options=options_of(options))


def eager_gradients(
    q: Any, k: Any, v: Any, grad: Any, options: dict[str, Any], *, softmax_dtype: Any = torch.float32
) -> tuple[Any, ...]:
    """The yardstick: the eager computation, its softmax in fp32 or, as in FlashAttention's tests, in the same dtype;
    differentiated in that dtype."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q @ wide_k.mT).to(softmax_dtype) * (options.get("scale") or q.shape[3] ** -0.5)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    visible = visible_keys(window_of(options), q.shape[2], k.shape[2], device=q.device)
    weights = torch.softmax(scores if visible is None else scores.masked_fill(~visible, -1e4), dim=-1)
    if visible is not None:
        weights = weights * visible
    return torch.autograd.grad(weights.to(q.dtype) @ wide_v, (q, k, v), grad.to(q.dtype))


def flash_gradients(q: Any, k: Any, v: Any, grad: Any, options: dict[str, Any], out: Any, lse: Any) -> tuple[Any, ...]:
    """FlashAttention's formulas in fp32, operands rounded to the dtype. A row's weighted mean of dP is the product of
    the output, which was rounded, and its gradient: where a row attends to one key, dP less that mean is not 0."""
    dtype, scale, cap = q.dtype, options.get("scale") or q.shape[3] ** -0.5, options.get("softcap")
    groups = q.shape[1] // k.shape[1]
    q, out, grad = (x.float() for x in (q, out, grad))
    wide_k, wide_v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ wide_k.mT * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    weights = torch.exp(scores - lse.unsqueeze(-1))
    visible = visible_keys(window_of(options), q.shape[2], k.shape[2], device=q.device)
    weights = weights if visible is None else weights.masked_fill(~visible, 0)
    pull = weights * (grad @ wide_v.mT - (grad * out).sum(-1, keepdim=True))
    pull = (pull * (1 - (scores / cap) ** 2) if cap else pull).to(dtype).float()
    dk, dv = (
        x.unflatten(1, (-1, groups)).sum(2).to(dtype)
        for x in (pull.mT @ q * scale, weights.to(dtype).float().mT @ grad)
    )
    return (pull @ wide_k * scale).to(dtype), dk, dv


def assert_gradients_as_accurate(gradients: Any, expected: Any, *yardsticks: Any) -> None:
    """By the rule of FlashAttention's tests: at most twice the largest error of the yardsticks, and twice what adding
    and subtracting 0.3 leaves of the truth."""
    found = []
    for gradient, truth, *others in zip(gradients, expected, *yardsticks, strict=True):
        rounded = truth.to(gradient.dtype)
        differences = [rounded + 0.3 - 0.3 - rounded, *(x.double() - truth for x in (gradient, *others))]
        found.append(torch.stack([x.abs().max().double() for x in differences]))
    for name, (rounding, error, *errors) in zip("qkv", torch.stack(found).tolist(), strict=True):
        assert math.isfinite(error), f"d{name}: not all elements are finite"
        allowed = 2 * max(errors) + 2 * rounding
        assert error <= allowed, f"d{name}: {error:.2e}; allowed: {allowed:.2e}"


# --- Comparing -------------------------------------------------------------------------------------------------------


def assert_same_bits(first: Iterable[Any], others: Iterable[Iterable[Any]]) -> None:
    """Of every run as of the first, whose results may be several. The GPU counts, and is waited for once."""
    first = list(first)
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    for other in others:
        for a, b in zip(first, other, strict=True):
            differences += (a.view(torch.uint8) != b.view(torch.uint8)).sum()
    assert differences.item() == 0, f"{differences.item()} bytes differ"


def assert_right(out: Any, expected: Any) -> None:
    """Within rounding of float64's result."""
    error = relative_error(out, expected)  # NaN, if an element is
    assert error <= ERROR[out.dtype], f"{error:.2e}; {out.isnan().sum().item()} of {out.numel()} elements are NaN"


def assert_as_accurate(out: Any, expected: Any, pytorchs: Any) -> None:
    # Where PyTorch is exact (one key: the output is v), rounding the truth is still allowed for.
    error, *bounds = relative_errors(expected, out, pytorchs, expected.to(out.dtype))
    allowed = ERROR_OVER_PYTORCH * max(bounds)
    assert error <= allowed, f"{error:.2e}; allowed: {allowed:.2e}"  # NaN, if an element is


def assert_close_lse(lse: Any, expected: Any) -> None:
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=1e-4, atol=1e-3)
