"""The backward pass on PyTorch's tensors: a config chosen, a plan kept, launches queued."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from flashwright.choice.choose import backward_config
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.kernels.registry import as_config, family_of
from flashwright.problem.dtypes import DType
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.backward_plans import BackwardKind, Gradients, Starts
from flashwright.runtime.devices import gpu_model
from flashwright.runtime.tensors import Packed

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=1024)
def backward_kind(
    options: AttentionOptions,
    dtype: DType,
    device_index: int,
    family: str | None = None,
    deterministic: bool = False,
    accumulates: bool = False,
) -> BackwardKind:
    """What computes gradients on one GPU with the same options. Kernels are chosen by head dimension and lengths when
    they come."""

    def choose(head_dim: int, q_length: int, kv_length: int) -> KernelConfig:
        occasion = Occasion.of(dtype, head_dim, options.window, q_length, kv_length, gpu_model(device_index))
        return backward_config(occasion, family=family, deterministic=deterministic)

    return BackwardKind(options, choose, device_index=device_index, accumulates=accumulates)


def forget_backward_plans() -> None:
    backward_kind.cache_clear()


def family_for_gradients(config: KernelConfig | str | None, family: str | None = None) -> str | None:
    """The family that a call names, by itself or by a config of the forward."""
    return family_of(as_config(config)).name if config else family


def differentiate_on_gpu(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: AttentionOptions,
    *,
    config: KernelConfig | str | None = None,
    family: str | None = None,
    deterministic: bool = False,
    starts: Starts | None = None,
    packed: Packed | None = None,
    gradients: Gradients | None = None,
    sums: Gradients | None = None,
) -> Gradients:
    """The kernels on checked tensors of any layout, which are not empty. `config` is the forward's and `family` the
    call's, where one was requested. Gradients are returned, in `gradients` if it is room for them, or added to `sums`,
    fp32."""
    import torch

    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    kind = backward_kind(
        options, DType.parse(str(q.dtype)), q.device.index, family_for_gradients(config, family), deterministic,
        accumulates=sums is not None,
    )  # fmt: skip
    if sums is not None:
        gradients = (sums[0].view(q.dtype), sums[1].view(q.dtype), sums[2].view(q.dtype))
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    return kind.run(grad_out, q, k, v, out, lse.contiguous(), grad_lse, starts, packed, gradients)
