"""Ampere configs that are good by experience, for problems without a tuned result.

The documents' filter refuses those of the wide heads (160 to 256 columns): a streamed Q at 64 × 64 by rule 5, a held
one at 64 × 32 by rule 4. The search space holds them all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashwright.hardware.architectures import KIB
from flashwright.kernels.family import Occasion
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.names import parse_kernel_name_into_config
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import SHORT

TWO_STAGES_SHARED_BYTES = 228 * KIB
"""Per multiprocessor: Hopper and the large Blackwells have as much."""

_COPIES = "async+eager+swizzled"
_WIDE_HEADS = {
    160: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+mma_sum+lazy",
    192: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+lazy",
    256: f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+lazy",
}
# d_head 64, 128 and 256: the fastest tried on an H200 (benchmarks/results/ampere_h200_bf16.json) but for `reversed`,
# which keeps the incomplete last block out of the main loop's way; the others are like their neighbours, and were not
# timed. Two blocks of these fit 228 KiB of shared memory.
_TWO_STAGES = _WIDE_HEADS | {
    256: f"64, 32, 4): {_COPIES}+load_0_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
    32: f"128, 128, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
    64: f"128, 128, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
    96: f"128, 64, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
    128: f"128, 64, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
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


def ampere_default(occasion: Occasion) -> FlashForwardKernelConfig:
    """The same is best with and without a mask."""
    if occasion.q_bucket == SHORT:
        table = _FEW_ROWS_TABLE
    elif occasion.gpu is not None and occasion.gpu.shared_bytes_per_sm >= TWO_STAGES_SHARED_BYTES:
        table = _TWO_STAGES
    else:
        table = _ONE_STAGE
    return _config(occasion.dtype, occasion.d_head, table)


def every_default(dtype: DType, d_head: int) -> tuple[FlashForwardKernelConfig, ...]:
    """What `ampere_default` may choose for a dtype and head dimension, on any GPU and at any length; none for a head
    dimension without kernels of its own."""
    tables = (_FEW_ROWS_TABLE, _TWO_STAGES, _ONE_STAGE)
    return tuple(dict.fromkeys(_config(dtype, d_head, table) for table in tables if d_head in table))


def _config(dtype: DType, d_head: int, table: Mapping[int, str]) -> FlashForwardKernelConfig:
    return parse_kernel_name_into_config(f"({dtype.name}, {d_head}, {table[d_head]}")
