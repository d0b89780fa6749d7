"""The public functions: `attention()`; `choice()`, which kernel it runs; `warm_up()`, which compiles ahead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args, overload

import numpy as np

from flashwright.choice.few_rows import decodes
from flashwright.compiler.kernel import Kernel
from flashwright.hardware.architectures import GPUModel
from flashwright.hardware.models import gpu_named
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import family_named
from flashwright.operators.chosen import CallProblem, KernelChoice, kernel_choice
from flashwright.operators.columns import kernel_columns, with_columns
from flashwright.operators.decode import decode
from flashwright.operators.forward import call_kind, config_chosen_for, forget_plans, run_on_simulator
from flashwright.operators.plain_calls import LAUNCHED, way_of_call
from flashwright.operators.warming import compile_ahead, needed_kernels
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions, as_pair, as_window
from flashwright.problem.shapes import HEAD_DIM_STEP, MAX_D_HEAD, are_wide, check_shapes, is_empty
from flashwright.runtime.decode_plans import CacheTensors
from flashwright.runtime.devices import GPUError, gpu_available, gpu_model, require_torch, this_gpu
from flashwright.runtime.tensors import check_kernel_dtype, check_tensors, with_vector_rows

if TYPE_CHECKING:
    import torch

Causal: TypeAlias = bool | Literal["bottom-right", "top-left"]
Backend: TypeAlias = Literal["gpu", "simulator", "reference"]
Tensor = TypeVar("Tensor", "torch.Tensor", "np.ndarray[Any, Any]")
"""What is computed is of the kind that q, k and v are of."""
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: Literal[False] = False,
    family: str | None = None,
    config: KernelConfig | str | None = None,
    backend: Backend | None = None,
    row_invariant: bool = False,
    deterministic: bool = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: Literal[True],
    family: str | None = None,
    config: KernelConfig | str | None = None,
    backend: Backend | None = None,
    row_invariant: bool = False,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: Causal = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool,
    family: str | None = None,
    config: KernelConfig | str | None = None,
    backend: Backend | None = None,
    row_invariant: bool = False,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: Sequence[int | None] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    family: str | None = None,
    config: KernelConfig | str | None = None,
    backend: Backend | None = None,
    row_invariant: bool = False,
    deterministic: bool = False,
) -> Any:
    """softmax(q·kᵀ·scale)·v, without ever holding the scores in memory.

    `q` is (batch, heads, rows, head_dim), `k` and `v` are (batch, kv_heads, keys, head_dim), where kv_heads divides
    heads: consecutive heads of `q` share one of `k` and `v`. The head dimension is a multiple of 8 up to 256, the
    dtype fp16 or bf16 (any floating point for the reference). Any strides will do; a tensor whose rows are not
    contiguous and 16-byte aligned is copied once per call. Values may have another head dimension than queries and
    keys, up to 256; then the smaller ones are copied, with columns of zeros, unless few rows are decoded. Above 256, up
    to 1,024, differing ones are decoded without gradients, as by `flash_attn_with_kvcache`: 576 and 512 of multi-head
    latent attention, by a kernel where `v` is `k[..., :512]`, most others by PyTorch's products with scores in memory.

    - `causal`: a row attends to no later key. True and "bottom-right" align the last row with the last key
      (as `flash_attn`), "top-left" the first row with the first key (as PyTorch).
    - `window`: (left, right), how many keys before and after its own position a row attends to; -1 or None: no limit.
    - `scale`: 1/√head_dim unless given. `softcap` c > 0: scores s become c·tanh(s/c).
    - `return_lse`: also return the log-sum-exp of each row's scores, (batch, heads, rows) in fp32.
    - Few rows on many keys are decoded: `choice()` says where. Calls with gradients, a `family`, a `config` or
      `row_invariant` are not.
    - `family` ("ampere", "hopper") and `config` (a config or its short form) override the choice of kernel.
    - `backend`: "gpu" (for CUDA tensors), "reference" (plain PyTorch; for all others), or "simulator" (the kernel
      itself, on CPU tensors or NumPy arrays). Chosen by the tensors' device unless given; CPU tensors
      with a `config`, a `family` or `row_invariant` run on the simulator.
    - `row_invariant`: a row's output and log-sum-exp depend, bit by bit, on its own query, the keys and values it
      attends to and the arguments alone: not on other rows, the batch, the chunk of a prefill that the row is in, or
      padding. Without it they do so among calls that use the same config of the forward. The same call gives the same
      bits always.
    - `deterministic`: gradients have the same bits in every run, too; `torch.use_deterministic_algorithms(True)` means
      the same. Without it, those of q may differ in their last bits.

    Rows with no key to attend to are 0, and their log-sum-exp is -inf. Gradients flow to q, k and v, from the
    log-sum-exp too. On a GPU they are computed by kernels of the family that the call names, if it has them for the
    head dimension.
    """
    if window is not None:
        window = as_pair(window)
    way = way_of_call(q, k, v)
    if way:  # beside the dispatcher
        # All that a kind of call depends on. Tensors elsewhere have other device indices, and fail when it is made.
        request = (
            q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(),
            causal, window, scale, softcap, return_lse, family, config, backend, row_invariant,
        )  # fmt: skip
        key = request if way == LAUNCHED else (request, deterministic)
        try:
            kind = _kinds.get(key)
        except TypeError:  # what has no hash is no argument of attention's, and is refused by its name
            kind = None
        if kind is None and backend in (None, "gpu"):
            kind = _kinds[key] = _new_kind(
                way, q, k, v, causal, window, scale, softcap, return_lse, family, config, row_invariant, deterministic
            )
        if kind is None:
            pass
        elif key is request:
            out = kind.torch.empty_like(q)
            arrangement = kind.arrangement(q, k, v, out)
            if arrangement is not None:
                out, lse = arrangement.run(q, k, v, out)
                return (out, lse) if return_lse else out
        else:
            recorded = kind.run(q, k, v, return_lse)
            if recorded is not None:
                return recorded

    if _decodes_wide_heads(q, k, v, way, backend) and family is None and config is None and not row_invariant:
        options = AttentionOptions.of(causal, window, scale, softcap)
        out, lse = decode(q, k, v, options, CacheTensors(), with_lse=return_lse)
        return (out, lse) if return_lse else out
    if head_dims := _differing_head_dims(q, k, v):
        head_dim, value_head_dim = head_dims
        if (
            way == LAUNCHED and backend in (None, "gpu") and family is None and config is None and not row_invariant
            and value_head_dim % HEAD_DIM_STEP == 0 and not is_empty(q.shape, k.shape)
            and decodes(as_window(causal, window), q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        ):  # fmt: skip
            options = AttentionOptions.of(causal, window, scale, softcap)
            k, v = with_vector_rows(k), with_vector_rows(v)
            out, lse = decode(q, k, v, options, CacheTensors(), with_lse=return_lse)
            return (out, lse) if return_lse else out
        columns = kernel_columns(head_dim, value_head_dim)
        result: Any = attention(
            *(with_columns(x, columns) for x in (q, k, v)), causal=causal, window=window,
            scale=head_dim**-0.5 if scale is None else scale, softcap=softcap, return_lse=return_lse, family=family,
            config=config, backend=backend, row_invariant=row_invariant, deterministic=deterministic,
        )  # fmt: skip
        return (result[0][..., :value_head_dim], result[1]) if return_lse else result[..., :value_head_dim]

    backend = _checked_backend(
        q, k, v, backend, named_kernel=config is not None or family is not None, row_invariant=row_invariant
    )
    options = AttentionOptions.of(causal, window, scale, softcap)
    if family is not None:
        family_named(family)
    out, lse = _run(q, k, v, backend, options, return_lse, family, config, row_invariant, deterministic)
    return (out, lse) if return_lse else out


def warm_up(
    head_dim: int,
    dtype: DType | str | torch.dtype = "bf16",
    *,
    causal: Causal = False,
    window: Sequence[int | None] | None = None,
    softcap: float = 0.0,
    grouped: bool = False,
    training: bool = False,
    packed: bool = False,
    deterministic: bool = False,
    family: str | None = None,
    device: torch.device | str | int | None = None,
    arch: str | None = None,
    progress: bool = False,
) -> list[Kernel[Any]]:
    """Compiles what calls of `attention()` with such arguments need, whatever their lengths, on all cores.

    The first use of each kind of call compiles for a second or two otherwise. `dtype` is fp16 or bf16; `causal`,
    `window`, `softcap` and `family` are those of the calls; `grouped`: q has more heads than k and v; `training`:
    gradients will be computed too, `deterministic` ones if that is requested; `packed`: sequences packed by cu_seqlens.
    On a GPU (`device`, by default the current one) the kernels are loaded as well. Elsewhere `arch` ("sm_90") says what
    to compile for, into the cache on disk. Returns the kernels.
    """
    options = AttentionOptions.of(causal, window, None, softcap)
    if not isinstance(head_dim, Integral):
        raise TypeError(f"head_dim: expected an integer, got {head_dim!r}")
    check_shapes((1, 1, 1, head_dim), (1, 1, 1, head_dim), (1, 1, 1, head_dim))
    index, gpu = _gpu_to_warm_up(device, arch)
    wanted = needed_kernels(
        head_dim, DType.parse(str(dtype) if not isinstance(dtype, DType) else dtype), options, gpu,
        grouped=grouped, training=training, packed=packed, deterministic=deterministic, family=family,
    )  # fmt: skip
    return compile_ahead(wanted, gpu.arch, index, progress=progress)


def choice(
    q: torch.Tensor | np.ndarray[Any, Any],
    k: torch.Tensor | np.ndarray[Any, Any],
    *,
    causal: Causal = False,
    window: Sequence[int | None] | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    family: str | None = None,
    config: KernelConfig | str | None = None,
    row_invariant: bool = False,
    deterministic: bool = False,
    training: bool | None = None,
    gpu: str | GPUModel | None = None,
) -> KernelChoice:
    """Which kernel `attention()` runs on a GPU for such tensors, and why. Nothing is compiled or computed.

    Of `q` and `k` only shapes, dtype and device are read, and whether they require gradients: they may be CPU tensors,
    tensors on "meta" or NumPy arrays. `training` says whether gradients will be computed, whatever the tensors require.
    The other arguments are those of `attention()`. `gpu` names a GPU ("h200", "rtx4090", "NVIDIA A100-PCIE-40GB", or an
    architecture, "sm_90"); by default it is the tensors' own, else this machine's.

    The answer has `config`, `family`, `source` ("tuned": your results, "shipped": the package's, "rule": experience,
    "requested": by `config`), `reason`, and `explain_command`, which shows all there is to know about the kernel. In
    training, its `gradients` are the same of the kernel that computes them.
    """
    options = AttentionOptions.of(causal, window, None, softcap)
    for name, x in (("q", q), ("k", k)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"{name}: expected a tensor or an array, got {type(x).__name__}")
    check_shapes(q.shape, k.shape, k.shape)
    if q.dtype != k.dtype:
        raise ValueError(f"k: dtype {k.dtype} differs from q's, {q.dtype}")
    if is_empty(q.shape, k.shape):
        raise ValueError(f"q of shape {tuple(q.shape)} and k of {tuple(k.shape)} leave nothing for a kernel to compute")
    if family is not None:
        family_named(family)
    problem = CallProblem(
        dtype=DType.parse(q.dtype),
        head_dim=int(q.shape[3]),
        q_length=int(q.shape[2]),
        kv_length=int(k.shape[2]),
        options=options,
        batch=int(q.shape[0]),
        heads=int(q.shape[1]),
        kv_heads=int(k.shape[1]),
        returns_lse=return_lse,
        row_invariant=row_invariant,
        training=_requires_gradients(q, k) if training is None else training,
        deterministic=deterministic,
    )
    return kernel_choice(problem, _gpu_to_choose_for(q, gpu), family=family, config=config)


def _requires_gradients(*tensors: Any) -> bool:
    return any(getattr(x, "requires_grad", False) for x in tensors) and require_torch("choice").is_grad_enabled()


def _gpu_to_choose_for(q: Any, gpu: str | GPUModel | None) -> GPUModel:
    if gpu is not None:
        return gpu if isinstance(gpu, GPUModel) else gpu_named(gpu)
    if getattr(q, "is_cuda", False):
        return gpu_model(q.device.index)
    return this_gpu()


def _gpu_to_warm_up(device: Any, arch: str | None) -> tuple[int | None, GPUModel]:
    if arch is not None:
        return None, GPUModel.of_architecture("", arch)
    if not gpu_available():
        raise GPUError(
            "there is no GPU to warm up; name what to compile for: arch='sm_90', on the command line --arch sm_90"
        )
    torch = require_torch("warm_up")
    chosen = torch.device("cuda" if device is None else device)
    index = torch.cuda.current_device() if chosen.index is None else chosen.index
    return index, gpu_model(index)


def _run(
    q: Any,
    k: Any,
    v: Any,
    backend: str,
    options: AttentionOptions,
    return_lse: bool,
    family: str | None,
    config: KernelConfig | str | None,
    row_invariant: bool,
    deterministic: bool,
) -> tuple[Any, Any]:
    if backend == "simulator":
        if not isinstance(q, np.ndarray) and _needs_gradients(q, k, v):
            from flashwright.operators.recorded import SimulatedCall

            return SimulatedCall(options, config, family, row_invariant, deterministic).run(q, k, v)
        return run_on_simulator(
            q, k, v, options, with_lse=return_lse, config=config, family=family, row_invariant=row_invariant
        )
    if backend == "reference":
        from flashwright.runtime.reference import attention_reference

        return attention_reference(q, k, v, options=options)
    from flashwright.operators import torch_ops

    if (family is not None or row_invariant) and config is None and not is_empty(q.shape, k.shape):
        config = config_chosen_for(q, k, options, family, row_invariant=row_invariant)
    name = "" if config is None else config if isinstance(config, str) else config.short_form()
    return torch_ops.forward(q, k, v, torch_ops.Request(options, return_lse, name, deterministic))


def _needs_gradients(*tensors: Any) -> bool:
    torch = require_torch("attention")
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


# --- Straight to the launch ----------------------------------------------------------------------------------------


_kinds: dict[tuple[Any, ...], Any] = {}
"""By the request: a `CallKind`, or a `RecordedKind` where gradients will be computed."""
MOST_KINDS = 4096
"""That are kept; then all are forgotten."""


def _new_kind(
    way: int,
    q: Any,
    k: Any,
    v: Any,
    causal: bool | str,
    window: Any,
    scale: float | None,
    softcap: float,
    return_lse: bool,
    family: str | None,
    config: KernelConfig | str | None,
    row_invariant: bool,
    deterministic: bool,
) -> Any:
    check_tensors(q, k, v)
    check_kernel_dtype(q)
    if family is not None:
        family_named(family)
    if len(_kinds) >= MOST_KINDS:
        _kinds.clear()
    options = AttentionOptions.of(causal, window, scale, softcap)
    dtype = DType.parse(str(q.dtype))
    if way == LAUNCHED:
        return call_kind(options, dtype, q.device.index, return_lse, config, family, row_invariant)
    from flashwright.operators.recorded import RecordedKind

    return RecordedKind(options, dtype, q.device.index, config, family, row_invariant, deterministic)


def forget_kinds() -> None:
    """Calls choose their kernels anew."""
    _kinds.clear()
    forget_plans()


def _decodes_wide_heads(q: Any, k: Any, v: Any, way: int, backend: Backend | None) -> bool:
    """Whether head dimensions are wider than the forward's, in a call that needs no gradient, on a GPU beside the
    dispatcher or on the CPU."""
    torch = sys.modules.get("torch")
    if torch is None or not all(type(x) is torch.Tensor for x in (q, k, v)) or not are_wide(q.shape, k.shape, v.shape):
        return False
    if way == LAUNCHED:
        return backend in (None, "gpu")
    if q.is_cuda or backend not in (None, "reference") or torch.compiler.is_compiling():
        return False
    check_tensors(q, k, v)
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))


def _differing_head_dims(q: Any, k: Any, v: Any) -> tuple[int, int] | None:
    """Of queries and values, where nothing else is wrong with their shapes; None if they agree or something is."""
    try:
        check_shapes(q.shape, k.shape, k.shape)
    except (AttributeError, ValueError):
        return None
    head_dim: int = q.shape[3]
    value_shape: Sequence[int] = getattr(v, "shape", ())
    differ = len(value_shape) == 4 and value_shape[:3] == k.shape[:3] and 0 < value_shape[3] <= MAX_D_HEAD
    return (head_dim, value_shape[3]) if differ and value_shape[3] != head_dim else None


# --- Checks --------------------------------------------------------------------------------------------------------


def _checked_backend(
    q: Any, k: Any, v: Any, backend: Backend | None, *, named_kernel: bool, row_invariant: bool
) -> Backend:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not known; allowed: {', '.join(map(repr, BACKENDS))}")
    if isinstance(q, np.ndarray):
        return _checked_array_backend(q, k, v, backend)
    check_tensors(q, k, v)
    check_shapes(q.shape, k.shape, v.shape)
    if backend is None:
        on_simulator = (named_kernel or row_invariant) and q.device.type == "cpu"
        backend = "gpu" if q.is_cuda else "simulator" if on_simulator else "reference"
    elif backend == "gpu" and not q.is_cuda:
        raise ValueError(f"backend: 'gpu' needs CUDA tensors, but q is on {q.device}")
    elif backend == "simulator" and q.device.type != "cpu":
        raise ValueError(f"backend: 'simulator' needs CPU tensors or NumPy arrays, but q is on {q.device}")
    elif backend == "reference" and named_kernel:
        raise ValueError("config and family name a kernel, which backend='reference' does not run; leave them out")
    elif backend == "reference" and row_invariant:
        raise ValueError("row_invariant: backend='reference' uses PyTorch's products, which do not promise it")
    if backend != "reference":
        check_kernel_dtype(q)
    return backend


def _checked_array_backend(q: np.ndarray, k: Any, v: Any, backend: Backend | None) -> Backend:
    if backend != "simulator":
        raise ValueError(f"backend: {backend!r} does not compute NumPy arrays; allowed: 'simulator'")
    for name, array in (("k", k), ("v", v)):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: expected a NumPy array as q is, got {type(array).__name__}")
        if array.dtype != q.dtype:
            raise ValueError(f"{name}: dtype {array.dtype} differs from q's, {q.dtype}")
    check_shapes(q.shape, k.shape, v.shape)
    DType.parse(str(q.dtype))
    return backend
