"""Compiling ahead: the kernels that calls of some kind will need, all lengths together."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from flashwright.choice.choose import backward_config, best_family, decode_choice, tuned_or_default
from flashwright.choice.few_rows import MOST_PACKED_ROWS
from flashwright.compiler.kernel import Kernel
from flashwright.hardware.architectures import GPUModel
from flashwright.kernels.family import KernelConfig, Occasion
from flashwright.kernels.forward.launch import forward_variant
from flashwright.kernels.registry import family_named, family_of
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import LENGTH_BUCKETS
from flashwright.problem.options import AttentionOptions
from flashwright.problem.variant import AttentionVariant
from flashwright.runtime.compiling import compile_all
from flashwright.runtime.loaded import loaded_kernel


def needed_kernels(
    head_dim: int,
    dtype: DType,
    options: AttentionOptions,
    gpu: GPUModel,
    *,
    grouped: bool = False,
    training: bool = False,
    packed: bool = False,
    deterministic: bool = False,
    family: str | None = None,
) -> list[tuple[KernelConfig, AttentionVariant]]:
    """What `attention()` uses on a GPU for such problems, whatever their lengths; each kernel once."""
    found: dict[tuple[KernelConfig, AttentionVariant], None] = {}
    causal = options.window.right is not None
    for q_bucket, kv_bucket in product(LENGTH_BUCKETS, LENGTH_BUCKETS):
        occasion = Occasion(dtype, head_dim, causal, q_bucket, kv_bucket, gpu)
        chosen = family_named(family) if family else best_family(occasion)
        config = tuned_or_default(chosen, occasion)
        for returns_lse in (False, True) if training else (False,):
            variant = forward_variant(
                config, options, head_dim=head_dim, grouped_heads=grouped, packed=packed, returns_lse=returns_lse
            )
            found[config, variant] = None
        if training:
            config = backward_config(occasion, family=family, deterministic=deterministic)
            variant = forward_variant(
                config, options, head_dim=head_dim, grouped_heads=grouped, packed=packed, returns_lse=False
            )
            found[config, variant] = None
    if family is None and not packed:
        for packed_rows in _packed_rows(grouped):
            config = decode_choice(dtype, head_dim, options.window, packed_rows, gpu=gpu).config
            variant = forward_variant(
                config, options, head_dim=head_dim, grouped_heads=grouped, packed=False, returns_lse=False
            )
            found[config, variant] = None
    return list(found)


def _packed_rows(grouped: bool) -> range:
    """Of calls that are decoded."""
    return range(1 + grouped, MOST_PACKED_ROWS + 1)


def compile_ahead(
    wanted: Iterable[tuple[KernelConfig, AttentionVariant]], arch: str, device_index: int | None, *, progress: bool
) -> list[Kernel[Any]]:
    """Compiles kernels, with their companions, on all cores into the cache on disk and, on a GPU, loads them."""
    parts = [
        (config, variant, companion)
        for config, variant in wanted
        for companion in (None, *(name for name, each in family_of(config).companions.items() if not each.on_request))
    ]
    kernels = compile_all(parts, arch, progress=progress)
    if device_index is not None:
        for config, variant, companion in parts:
            loaded_kernel(config, variant, device_index, companion)
    return kernels
