"""Which config computes a problem when nobody chose one."""

from __future__ import annotations

import re
from functools import cache

from flashwright.kernel_configs import DType, FlashForwardKernelConfig, parse_kernel_name_into_config

NATIVE_D_HEADS = (32, 64, 96, 128, 160, 192, 256)
"""Head dimensions with a kernel of their own; others are padded up to the next inside the kernel."""

_FEW_ROWS = 64
"""Up to this many query rows, a block of 128 rows would be half empty."""

_COPIES = "async+eager+swizzled"
_WIDE_HEADS = {
    160: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+mma_sum+lazy",
    192: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+lazy",
    256: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+lazy",
}
# d_head 64, 128 and 256: the fastest tried on an H200 (benchmarks/results/ampere_h200_bf16.json); the others are like
# their neighbours, and were not timed. Two blocks of these fit 228 KiB of shared memory.
_TWO_STAGES = _WIDE_HEADS | {
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


def native_d_head(head_dim: int) -> int:
    """The smallest head dimension with a kernel of its own that holds `head_dim` columns."""
    for d_head in NATIVE_D_HEADS:
        if head_dim <= d_head:
            return d_head
    raise ValueError(f"head_dim: {head_dim} is not allowed; allowed: multiples of 8 up to {NATIVE_D_HEADS[-1]}")


@cache
def _has_much_shared_memory(gpu: str | None) -> bool:
    """Whether a GPU of this name has 228 KiB of shared memory per multiprocessor: Hopper and the large Blackwells."""
    return gpu is not None and re.search(r"\b(H\d00|GH\d00|B\d00|GB\d00)", gpu) is not None


def default_config(
    dtype: DType, head_dim: int, *, causal: bool, q_length: int, kv_length: int, gpu: str | None
) -> FlashForwardKernelConfig:
    """A good config for a problem on a GPU of some name. On an H200 the same one is best with and without a mask."""
    if q_length <= _FEW_ROWS:
        table = _FEW_ROWS_TABLE
    else:
        table = _TWO_STAGES if _has_much_shared_memory(gpu) else _ONE_STAGE
    return _parsed(dtype, d_head := native_d_head(head_dim), table[d_head])


@cache
def _parsed(dtype: DType, d_head: int, blocks: str) -> FlashForwardKernelConfig:
    return parse_kernel_name_into_config(f"({dtype.name}, {d_head}, {blocks}")
