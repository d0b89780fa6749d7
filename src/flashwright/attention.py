"""`attention()`: checks what it is given, chooses a kernel, and runs it where the tensors are.

A call on a GPU that needs no gradient goes straight to the launch; everything else that PyTorch may ask of a function
(gradients, `torch.compile`, fake tensors, `vmap`) goes through the custom operators of `integrations.torch_ops`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.defaults import default_config
from flashwright.families import ForwardKernelConfig, family_named, family_of, parse_config
from flashwright.gpu import ForwardPlan, GPUError, PlanCache, make_plan
from flashwright.kernel_configs import MAX_D_HEAD, DType
from flashwright.runtime import run_forward
from flashwright.tile_shapes import VECTOR_BYTES
from flashwright.variant import Window

if TYPE_CHECKING:
    import torch

BACKENDS = ("gpu", "simulator", "reference")
CAUSAL_ALIGNMENTS = {"bottom-right": True, "top-left": False}
HEAD_DIM_STEP = 8

UNLIMITED = -1
"""What `flash_attn` writes for a side of a window without a limit; None means the same here."""


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    family: str | None = None,
    config: ForwardKernelConfig | str | None = None,
    backend: str | None = None,
) -> Any:
    """softmax(q·kᵀ·scale)·v, without ever holding the scores in memory.

    `q` is (batch, heads, rows, head_dim), `k` and `v` are (batch, kv_heads, keys, head_dim), where kv_heads divides
    heads: consecutive heads of `q` share one of `k` and `v`. The head dimension is a multiple of 8 up to 256, the
    dtype fp16 or bf16 (any floating point for the reference). Any strides will do; a tensor whose rows are not
    contiguous and 16-byte aligned is copied once per call.

    - `causal`: a row does not look at later keys. True and "bottom-right" align the last row with the last key
      (as `flash_attn`), "top-left" the first row with the first key (as PyTorch).
    - `window`: (left, right), how many keys before and after its own position a row looks at; -1 or None: no limit.
    - `scale`: 1/√head_dim unless given. `softcap` c > 0: scores s become c·tanh(s/c).
    - `return_lse`: also return the log-sum-exp of each row's scores, (batch, heads, rows) in fp32.
    - `family` ("ampere", "hopper") and `config` (a config or its short form) override the choice of kernel.
    - `backend`: "gpu" (for CUDA tensors), "reference" (plain PyTorch; for all others), or "simulator" (the kernel
      itself, on CPU tensors or NumPy arrays; no gradients). Chosen by the tensors' device unless given.

    Rows with nothing to look at are 0, and their log-sum-exp is -inf. Gradients flow to q, k and v, from the
    log-sum-exp too.
    """
    if isinstance(q, np.ndarray):
        return _attention_of_arrays(q, k, v, causal, window, scale, softcap, return_lse, family, config, backend)
    torch = _require_torch()
    if window.__class__ is list:
        window = tuple(window)
    if not torch.compiler.is_compiling() and needs_no_dispatcher(torch, q, k, v):
        # All that a plan depends on. Tensors elsewhere have other device indices, and fail when the plan is made.
        key = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, k.dtype, v.dtype,
            q.get_device(), k.get_device(), v.get_device(),
            causal, window, scale, softcap, return_lse, family, config, backend,
        )  # fmt: skip
        try:
            plan = _plans.get(key) or _remember_plan(
                key, q, k, v, causal, window, scale, softcap, return_lse, family, config, backend
            )
            if plan is not None:
                out, lse = plan.run(q, k, v)
                return (out, lse) if return_lse else out
        except ValueError:  # rows that must be copied first, or what is wrong is said below
            pass

    backend = _checked_backend(torch, q, k, v, backend)
    check_options(scale, softcap, family)
    resolved = as_window(causal, window)
    if backend == "reference":
        from flashwright.reference import attention_reference

        out, lse = attention_reference(q, k, v, scale=scale, window=resolved, softcap=softcap)
    elif backend == "simulator":
        _refuse_gradients(torch, q, k, v)
        out, lse = run_kernel(
            q, k, v, scale=scale, window=resolved, softcap=softcap, with_lse=return_lse,
            config=config, family=family, simulated=True,
        )  # fmt: skip
    else:
        from flashwright.integrations import torch_ops

        if family is not None and config is None and not is_empty(q, k):
            config = chosen_config(q, k, resolved, None, family=family)
        name = "" if config is None else config if isinstance(config, str) else config.short_form()
        out, lse = torch_ops.forward(
            q, k, v, scale=scale, window=resolved, softcap=softcap, with_lse=return_lse, config=name
        )
    return (out, lse) if return_lse else out


# --- Straight to the launch ----------------------------------------------------------------------------------------


_plans = PlanCache()


def forget_plans() -> None:
    """Calls choose their kernels anew."""
    _plans.clear()


def needs_no_dispatcher(torch: Any, q: Any, k: Any, v: Any) -> bool:
    """Whether nothing watches this call but the GPU: no gradient, no fake, traced, wrapped or batched tensors."""
    plain = torch.Tensor
    return (
        q.__class__ is plain
        and k.__class__ is plain
        and v.__class__ is plain
        and q.is_cuda
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def _remember_plan(
    key: tuple[Any, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool | str,
    window: Any,
    scale: float | None,
    softcap: float,
    return_lse: bool,
    family: str | None,
    config: ForwardKernelConfig | str | None,
    backend: str | None,
) -> ForwardPlan | None:
    """None if the call needs more than a launch: another backend, or a result for tensors without elements."""
    if _checked_backend(_require_torch(), q, k, v, backend) != "gpu":
        return None
    check_options(scale, softcap, family)
    resolved = as_window(causal, window)
    if is_empty(q, k):
        return None
    chosen = chosen_config(q, k, resolved, config, family=family)
    plan = make_plan(chosen, q, k, v, scale=scale, window=resolved, softcap=softcap, return_lse=return_lse)
    return _plans.remember(key, plan)


def run_kernel(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None,
    window: Window,
    softcap: float,
    with_lse: bool,
    config: ForwardKernelConfig | str | None,
    family: str | None = None,
    simulated: bool = False,
) -> tuple[Any, Any]:
    """The kernel on checked tensors of any layout: output, and the log-sum-exp or None."""
    if is_empty(q, k):
        return _nothing_attended(q, with_lse)
    chosen = chosen_config(q, k, window, config, family=family)
    out = None if simulated else empty_output(q)
    q, k, v = (with_vector_rows(x) for x in (q, k, v))
    result = run_forward(
        chosen, q, k, v, scale=scale, window=window, softcap=softcap, return_lse=with_lse, out=out,
        device="simulator" if simulated else None,
    )  # fmt: skip
    return result if with_lse else (result, None)


def _nothing_attended(q: Any, with_lse: bool) -> tuple[Any, Any]:
    if isinstance(q, np.ndarray):
        return np.zeros_like(q), np.full(q.shape[:3], -np.inf, np.float32) if with_lse else None
    torch = _require_torch()
    out = empty_output(q).zero_()
    if not with_lse:
        return out, None
    return out, torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)


def is_empty(q: Any, k: Any) -> bool:
    """Whether there is no row to compute, or no key to look at."""
    return 0 in q.shape or 0 in k.shape


def empty_output(q: torch.Tensor) -> torch.Tensor:
    """Room for the output: laid out as q, or contiguous where q's rows are not."""
    torch = _require_torch()
    out = torch.empty_like(q)
    return out if out.stride(-1) == 1 else torch.empty_like(q, memory_format=torch.contiguous_format)


def has_vector_rows(x: torch.Tensor) -> bool:
    """Whether the kernel can read the rows in 16-byte vectors, the address apart."""
    elements = VECTOR_BYTES // x.element_size()
    *outer, inner = x.stride()
    return inner == 1 and not any(s % elements and n > 1 for s, n in zip(outer, x.shape, strict=False))


def with_vector_rows(x: Any) -> Any:
    """The tensor itself if the kernel can read its rows in 16-byte vectors, otherwise a copy."""
    if isinstance(x, np.ndarray):
        strides = [stride for stride, n in zip(x.strides[:-1], x.shape, strict=False) if n > 1]
        fits = x.strides[-1] == x.itemsize and not any(s % VECTOR_BYTES or s < 0 for s in strides)
        return x if fits else np.ascontiguousarray(x)
    if has_vector_rows(x) and x.data_ptr() % VECTOR_BYTES == 0:
        return x
    return x.clone(memory_format=_require_torch().contiguous_format)


# --- Which kernel --------------------------------------------------------------------------------------------------


def chosen_config(
    q: Any,
    k: Any,
    window: Window,
    config: ForwardKernelConfig | str | None,
    *,
    family: str | None = None,
    lengths: tuple[int, int] | None = None,
) -> ForwardKernelConfig:
    """The config that was asked for, or the default for the GPU and the problem."""
    dtype, head_dim = DType.parse(str(q.dtype)), q.shape[3]
    if config is None or config == "":
        q_length, kv_length = lengths or (q.shape[2], k.shape[2])
        gpu = None if isinstance(q, np.ndarray) or not q.is_cuda else _gpu_name(q.device.index)
        return default_config(
            dtype, head_dim, causal=window.right is not None, q_length=q_length, kv_length=kv_length, gpu=gpu,
            family=family,
        )  # fmt: skip
    chosen = parsed_config(config) if isinstance(config, str) else config
    if not isinstance(chosen, ForwardKernelConfig):
        raise TypeError(f"config: expected a config of a kernel family or its short form, got {type(config).__name__}")
    if family is not None and family_of(chosen).name != family:
        raise ValueError(f"config: {chosen} is not of the {family} family, which was asked for too")
    if chosen.dtype != dtype:
        raise ValueError(f"config: {chosen} computes {chosen.dtype.name}, but q is {dtype.name}")
    if head_dim > chosen.d_head:
        raise ValueError(f"config: {chosen} computes head dimensions up to {chosen.d_head}, but q has {head_dim}")
    return chosen


parsed_config = lru_cache(maxsize=256)(parse_config)


@cache
def _gpu_name(device_index: int) -> str:
    return _require_torch().cuda.get_device_name(device_index)


# --- What is asked for ---------------------------------------------------------------------------------------------


def as_window(causal: bool | str, window: Any) -> Window:
    """`causal` and `window` as the one thing that they are to the kernel."""
    bottom_right = True
    if isinstance(causal, str):
        if causal not in CAUSAL_ALIGNMENTS:
            raise ValueError(f"causal: {causal!r} is not allowed; allowed: True, False, {_listed(CAUSAL_ALIGNMENTS)}")
        bottom_right = CAUSAL_ALIGNMENTS[causal]
    elif causal not in (True, False):
        raise ValueError(f"causal: {causal!r} is not allowed; allowed: True, False, {_listed(CAUSAL_ALIGNMENTS)}")
    if window is None:
        left = right = None
    else:
        if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
            raise ValueError(f"window: {window!r} is not allowed; allowed: None, or a pair (left, right)")
        left, right = (_limit(window, side) for side in window)
    return Window(left, 0 if causal else right, bottom_right)


def _limit(window: Any, side: Any) -> int | None:
    if side is None or side == UNLIMITED:
        return None
    if isinstance(side, bool) or not isinstance(side, int) or side < 0:
        raise ValueError(f"window: {window!r} is not allowed; each side must be None, -1 (no limit) or at least 0")
    return side


def _checked_backend(torch: Any, q: Any, k: Any, v: Any, backend: str | None) -> str:
    check_tensors(q, k, v)
    check_shapes(q.shape, k.shape, v.shape)
    if backend is None:
        backend = "gpu" if q.is_cuda else "reference"
    elif backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known; allowed: {_listed(BACKENDS)}")
    elif backend == "gpu" and not q.is_cuda:
        raise ValueError(f"backend: 'gpu' needs CUDA tensors, but q is on {q.device}")
    elif backend == "simulator" and q.device.type != "cpu":
        raise ValueError(f"backend: 'simulator' needs CPU tensors or NumPy arrays, but q is on {q.device}")
    if backend != "reference":
        check_kernel_dtype(q)
    return backend


def check_tensors(q: Any, k: Any, v: Any) -> None:
    """Raises for tensors that are not of one device and one dtype that is computed there."""
    torch = _require_torch()
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
    torch = _require_torch()
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"q: dtype {q.dtype} is not allowed; allowed: torch.float16, torch.bfloat16 (backend='reference' computes "
            "any floating point)"
        )


def check_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> None:
    """Raises `ValueError` for shapes that are not attention's."""
    for name, shape in (("q", q), ("k", k), ("v", v)):
        if len(shape) != 4:
            raise ValueError(f"{name}: shape {tuple(shape)} is not allowed; allowed: (batch, heads, rows, head_dim)")
    if tuple(k) != tuple(v):
        raise ValueError(f"k and v must have the same shape; got {tuple(k)} and {tuple(v)}")
    if q[0] != k[0]:
        raise ValueError(f"k: batch is {k[0]}, but q's is {q[0]}")
    if q[3] != k[3]:
        raise ValueError(f"k: head_dim is {k[3]}, but q's is {q[3]}")
    if q[3] % HEAD_DIM_STEP or not 0 < q[3] <= MAX_D_HEAD:
        raise ValueError(
            f"q: head_dim {q[3]} is not allowed; allowed: multiples of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to "
            f"{MAX_D_HEAD}"
        )
    if q[1] != k[1] and (k[1] == 0 or q[1] % k[1]):
        raise ValueError(f"q has {q[1]} heads, which is not a multiple of the {k[1]} heads of k and v")


def check_options(scale: float | None, softcap: float, family: str | None = None) -> None:
    """Raises `ValueError` for numbers and names that are not attention's."""
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale: {scale} is not allowed; allowed: None (1/√head_dim), or a positive finite number")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap: {softcap} is not allowed; allowed: 0 (none), or a positive finite number")
    if family is not None:
        family_named(family)


def _refuse_gradients(torch: Any, *tensors: Any) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            "backend: 'simulator' computes no gradients; call it under torch.no_grad(), or use backend='reference'"
        )


def _attention_of_arrays(
    q: np.ndarray,
    k: Any,
    v: Any,
    causal: bool | str,
    window: Any,
    scale: float | None,
    softcap: float,
    return_lse: bool,
    family: str | None,
    config: ForwardKernelConfig | str | None,
    backend: str | None,
) -> Any:
    if backend != "simulator":
        raise ValueError(f"backend: {backend!r} does not compute NumPy arrays; allowed: 'simulator'")
    for name, array in (("k", k), ("v", v)):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array as q is, got {type(array).__name__}")
        if array.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {array.dtype} differs from q's, {q.dtype}")
    check_shapes(q.shape, k.shape, v.shape)
    DType.parse(str(q.dtype))
    check_options(scale, softcap, family)
    out, lse = run_kernel(
        q,
        k,
        v,
        scale=scale,
        window=as_window(causal, window),
        softcap=softcap,
        with_lse=return_lse,
        config=config,
        family=family,
        simulated=True,
    )
    return (out, lse) if return_lse else out


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)


def _require_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise GPUError("attention needs PyTorch; install it with: pip install 'flashwright[torch]'") from error
    return torch
