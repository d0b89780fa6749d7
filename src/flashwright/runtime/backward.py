"""Running the backward of one config, on a GPU or on the simulated one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from flashwright.kernels.family import KernelConfig
from flashwright.kernels.registry import as_config, family_of
from flashwright.problem.options import AttentionOptions
from flashwright.problem.sequences import check_starts
from flashwright.problem.window import FULL, Window
from flashwright.runtime.backward_plans import BackwardKind
from flashwright.runtime.simulated import simulate_backward
from flashwright.runtime.tensors import Packed, as_numpy, as_torch, check_tensors_for, longest_of


def run_backward(
    config: KernelConfig | str,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    scale: float | None = None,
    window: Window = FULL,
    softcap: float = 0.0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sums: tuple[Any, Any, Any] | None = None,
    device: str | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients of q, k and v by the kernels of one config of the backward, which may be given by its short form.

    `out` and `lse` are what `run_forward` returned for the same tensors and options; `do` is the gradient of the one
    and `dlse`, where there is any, of the other. Rows that attend to no key, and rows of no sequence, have gradients
    of 0. With `sums`, which are fp32 and of the shapes of q, k and v, gradients are added to them, in place. PyTorch
    tensors run on their GPU and its current stream; with `device="simulator"`, NumPy arrays and CPU
    tensors run on the simulated GPU, hazards checked.
    """
    known = as_config(config)
    if (operation := family_of(known).operation.name) != "backward":
        raise ValueError(f"config: {known} is of the operation {operation}, not backward")
    options = AttentionOptions(window, scale, softcap)
    starts: tuple[Any, Any] | None = None
    packed: Packed | None = None
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        check_starts(cu_seqlens_q, cu_seqlens_k)
        starts = (cu_seqlens_q, cu_seqlens_k)
        packed = (len(cu_seqlens_q) - 1, longest_of(cu_seqlens_q, max_seqlen_q), longest_of(cu_seqlens_k, max_seqlen_k))
    if device == "simulator":
        return _run_on_simulator(known, do, q, k, v, out, lse, dlse, options, starts, packed, sums)
    if device in (None, "gpu"):
        return _run_on_gpu(known, do, q, k, v, out, lse, dlse, options, starts, packed, sums)
    raise ValueError(f"device: {device!r} is not known; allowed: 'gpu', 'simulator'")


def _run_on_gpu(
    config: KernelConfig,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    options: AttentionOptions,
    starts: tuple[Any, Any] | None,
    packed: Packed | None,
    sums: tuple[Any, Any, Any] | None,
) -> tuple[Any, Any, Any]:
    check_tensors_for(config, {"q": q, "k": k, "v": v}, {"out": out, "do": do}, starts)
    if starts is not None:
        starts = (starts[0].contiguous(), starts[1].contiguous())
    dlse = None if dlse is None else dlse.contiguous()
    kind = _kind(config, options, q.device.index, sums is not None)
    if sums is None:
        return kind.run(do, q, k, v, out, lse.contiguous(), dlse, starts, packed)
    kind.run(do, q, k, v, out, lse.contiguous(), dlse, starts, packed, tuple(x.view(q.dtype) for x in sums))
    return sums


@lru_cache(maxsize=4096)
def _kind(config: KernelConfig, options: AttentionOptions, device_index: int, accumulates: bool) -> BackwardKind:
    options.check()
    return BackwardKind(options, lambda *sizes: config, device_index=device_index, accumulates=accumulates)


def _run_on_simulator(
    config: KernelConfig,
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dlse: Any,
    options: AttentionOptions,
    starts: tuple[Any, Any] | None,
    packed: Packed | None,
    sums: tuple[Any, Any, Any] | None,
) -> tuple[Any, Any, Any]:
    known_starts = None if starts is None else (np.ascontiguousarray(starts[0]), np.ascontiguousarray(starts[1]))
    simulated = simulate_backward(
        config,
        as_numpy("do", do),
        as_numpy("q", q),
        as_numpy("k", k),
        as_numpy("v", v),
        as_numpy("out", out),
        np.asarray(lse),
        dlse=None if dlse is None else np.asarray(dlse),
        options=options,
        starts=known_starts,
        max_lengths=(0, 0) if packed is None else packed[1:],
        sums=None if sums is None else (np.asarray(sums[0]), np.asarray(sums[1]), np.asarray(sums[2])),
    )
    if sums is not None:
        return sums
    gradients = (simulated.dq, simulated.dk, simulated.dv)
    if isinstance(q, np.ndarray):
        return gradients
    dq, dk, dv = (as_torch(gradient, q.dtype) for gradient in gradients)
    return dq, dk, dv
