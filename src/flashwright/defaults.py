"""Which config computes a problem when nobody chose one: what was measured fastest, or else what experience says."""

from __future__ import annotations

import re
from functools import cache

from flashwright.families import AMPERE, FAMILIES, HOPPER, ForwardKernelConfig
from flashwright.hopper.defaults import hopper_default
from flashwright.kernel_configs import DType, parse_kernel_name_into_config

_COPIES = "async+eager+swizzled"
_WIDE_HEADS = {
    160: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+mma_sum+lazy",
    192: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+lazy",
    256: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+lazy",
}
# d_head 64, 128 and 256: the fastest tried on an H200 (benchmarks/results/ampere_h200_bf16.json); the others are like
# their neighbours, and were not timed. Two blocks of these fit 228 KiB of shared memory.
_TWO_STAGES = _WIDE_HEADS | {
    256: f"64, 32, 4): {_COPIES}+load_0_2_2_tiles+opt_softmax+mma_sum+reorder+two_stages+lazy",
    32: f"128, 128, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+reorder+two_stages+lazy",
    64: f"128, 128, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+reorder+two_stages+lazy",
    96: f"128, 64, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+reorder+two_stages+lazy",
    128: f"128, 64, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+reorder+two_stages+lazy",
}
_ONE_STAGE = _WIDE_HEADS | {
    32: f"128, 128, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+lazy",
    64: f"128, 128, 4): {_COPIES}+load_4_4_2_tiles+opt_softmax+mma_sum+lazy",
    96: f"128, 64, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+lazy",
    128: f"128, 64, 4): {_COPIES}+load_2_2_0_tiles+buffer+opt_softmax+mma_sum+lazy",
}
_FEW_ROWS_TABLE = _WIDE_HEADS | dict.fromkeys(
    (32, 64, 96, 128), f"64, 64, 4): {_COPIES}+load_0_2_2_tiles+opt_softmax+mma_sum+lazy"
)


def native_d_head(head_dim: int, family: str = AMPERE.name) -> int:
    """The smallest head dimension with a kernel of its own that holds `head_dim` columns."""
    d_heads = FAMILIES[family].d_heads
    for d_head in d_heads:
        if head_dim <= d_head:
            return d_head
    raise ValueError(f"head_dim: {head_dim} is not allowed; allowed: multiples of 8 up to {d_heads[-1]}")


def best_family(gpu: str | None, q_bucket: str) -> str:
    """Hopper's own kernels on Hopper GPUs, except for a few rows, of which a tile of 128 would be mostly empty."""
    is_hopper = gpu is not None and re.search(r"\bG?H(20|100|200|800)\b", gpu) is not None
    return HOPPER.name if is_hopper and q_bucket != SHORT else AMPERE.name


def _has_much_shared_memory(gpu: str | None) -> bool:
    """Whether a GPU of this name has 228 KiB of shared memory per multiprocessor: Hopper and the large Blackwells."""
    return gpu is not None and re.search(r"\b(H\d00|GH\d00|B\d00|GB\d00)", gpu) is not None


_LONGEST_OF_BUCKET = {"1-64": 64, "65-1024": 1024, "1025-4096": 4096}
SHORT, MEDIUM, LONG, LONGEST = LENGTH_BUCKETS = (*_LONGEST_OF_BUCKET, "4097-")
"""Rows of queries, and of keys, within which one config serves. Up to 64, a block of 128 would be half empty."""


def length_bucket(length: int) -> str:
    return next((bucket for bucket, longest in _LONGEST_OF_BUCKET.items() if length <= longest), LONGEST)


def default_config(
    dtype: DType,
    head_dim: int,
    *,
    causal: bool,
    q_length: int,
    kv_length: int,
    gpu: str | None,
    family: str | None = None,
) -> ForwardKernelConfig:
    """A good config for a problem on a GPU of some name (None: no GPU), of the best family there or of a given one.

    What was measured on such a GPU comes first: the user's own tuning, then the results that ship with the package.
    """
    return _default_config(dtype, head_dim, causal, length_bucket(q_length), length_bucket(kv_length), gpu, family)


@cache
def _default_config(
    dtype: DType, head_dim: int, causal: bool, q_bucket: str, kv_bucket: str, gpu: str | None, family: str | None
) -> ForwardKernelConfig:
    family = family or best_family(gpu, q_bucket)
    d_head = native_d_head(head_dim, family)
    if gpu is not None:
        from flashwright.tuning.lookup import tuned_config  # reads files, so only when a GPU asks for the first time

        tuned = tuned_config(gpu, family, dtype, d_head, causal, q_bucket, kv_bucket)
        if tuned is not None:
            return tuned
    return untuned_config(dtype, d_head, q_bucket=q_bucket, gpu=gpu, family=family, causal=causal)


def forget_choices() -> None:
    """The next call looks for measured results anew."""
    _default_config.cache_clear()


def untuned_config(
    dtype: DType, d_head: int, *, q_bucket: str, gpu: str | None, family: str = AMPERE.name, causal: bool = False
) -> ForwardKernelConfig:
    """What is good by experience. In the Ampere family the same is best with and without a mask."""
    if family == HOPPER.name:
        return hopper_default(dtype, d_head, causal=causal, long=q_bucket in (LONG, LONGEST))
    if q_bucket == SHORT:
        table = _FEW_ROWS_TABLE
    else:
        table = _TWO_STAGES if _has_much_shared_memory(gpu) else _ONE_STAGE
    return parse_kernel_name_into_config(f"({dtype.name}, {d_head}, {table[d_head]}")
