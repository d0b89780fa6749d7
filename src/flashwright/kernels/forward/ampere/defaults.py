"""Ampere configs that are good by experience, for problems without a tuned result.

The documents' filter refuses some of them: a streamed Q at 64 × 64 by rule 5 (wide heads), one of 128 rows that is held
in registers by rule 6 (d_head 32 and 256). The search space holds them all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashwright.hardware.architectures import KIB
from flashwright.kernels.family import Occasion
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.names import parse_kernel_name_into_config
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import MEDIUM, SHORT, SHORTEST

TWO_STAGES_SHARED_BYTES = 228 * KIB
"""Per multiprocessor: Hopper and the large Blackwells have as much."""

_SHORT_BUCKETS = (SHORTEST, SHORT)
_COPIES = "async+eager+swizzled"
_HELD_Q = f"64, 64, 4): {_COPIES}+load_0_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+lazy"
_STREAMED_Q = f"64, 64, 4): {_COPIES}+load_2_2_2_tiles+buffer+opt_softmax+mma_sum+lazy"
_WIDE_HEADS = {160: _HELD_Q, 192: _HELD_Q, 256: _STREAMED_Q}
# The fastest of those timed on an H200 across lengths and kinds of scores, but for d_head 160, which is like 192, and
# for `reversed`, which keeps the incomplete last block out of the main loop's way. Two blocks of these fit 228 KiB of
# shared memory; at d_head 256, one of 8 warps.
_TWO_STAGES = _WIDE_HEADS | {
    256: f"128, 48, 8): {_COPIES}+load_0_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+lazy+ring_3",
    32: f"128, 64, 4): {_COPIES}+load_0_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
    64: f"128, 128, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
    96: f"128, 64, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
    128: f"128, 64, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+two_stages+lazy",
}
# At d_head 256, up to 1,024 rows and keys: on an H200, in bf16, these have 1.13 and 1.02 × the speed of blocks of
# 128 × 48 at 512 rows, causal and full, 1.05 and 0.99 × at 1,024, and gain more on scores that fall along the keys.
# fp16 was not timed.
_MEDIUM_CAUSAL = _TWO_STAGES | {256: f"64, 32, 4): {_COPIES}+load_0_2_2_tiles+opt_softmax+mma_sum+reorder+lazy+ring_2"}
_MEDIUM_FULL = _TWO_STAGES | {
    256: f"128, 32, 8): {_COPIES}+load_0_2_2_tiles+opt_softmax+reversed+mma_sum+reorder+lazy+ring_4",
}
_ONE_STAGE = _WIDE_HEADS | {
    32: f"128, 128, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+lazy",
    64: f"128, 128, 4): {_COPIES}+load_4_4_2_tiles+opt_softmax+mma_sum+lazy",
    96: f"128, 64, 4): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+lazy",
    128: f"128, 64, 4): {_COPIES}+load_2_2_0_tiles+buffer+opt_softmax+mma_sum+lazy",
}
_NARROW = (32, 64, 96, 128)
_FEW_ROWS = {
    **dict.fromkeys(_NARROW, f"64, 64, 4): {_COPIES}+load_0_2_2_tiles+opt_softmax+mma_sum+lazy"),
    **dict.fromkeys(_WIDE_HEADS, _STREAMED_Q),
}
# Many short sequences, packed or not, leave large blocks mostly empty. On an H200, blocks of one warp are the fastest
# for up to 16 rows. For up to 64 rows and keys, those of two gain most over packed sequences of all lengths, and lose
# little where all are as long.
_SHORT_SEQUENCES = _FEW_ROWS | dict.fromkeys(
    _NARROW, f"32, 32, 2): {_COPIES}+load_0_2_2_tiles+opt_softmax+mma_sum+lazy"
)
_SHORTEST_SEQUENCES = {
    **dict.fromkeys((32, 64), f"16, 16, 1): {_COPIES}+load_0_2_2_tiles+opt_softmax+mma_sum+lazy"),
    **dict.fromkeys((96, 128, 256), f"16, 16, 1): {_COPIES}+load_0_2_2_tiles+opt_softmax+mma_sum+reorder+lazy"),
    **dict.fromkeys((160, 192), f"16, 16, 1): {_COPIES}+load_2_2_2_tiles+opt_softmax+mma_sum+lazy"),
}


def ampere_default(occasion: Occasion) -> FlashForwardKernelConfig:
    """The same is best with and without a mask, but for wide heads of few keys."""
    if occasion.q_bucket in _SHORT_BUCKETS:
        table = _table_of_few_rows(occasion)
    elif occasion.gpu is None or occasion.gpu.shared_bytes_per_sm < TWO_STAGES_SHARED_BYTES:
        table = _ONE_STAGE
    elif occasion.q_bucket == occasion.kv_bucket == MEDIUM:
        table = _MEDIUM_CAUSAL if occasion.causal else _MEDIUM_FULL
    else:
        table = _TWO_STAGES
    return _config(occasion.dtype, occasion.d_head, table)


def _table_of_few_rows(occasion: Occasion) -> Mapping[int, str]:
    if occasion.kv_bucket not in _SHORT_BUCKETS:
        return _FEW_ROWS
    return _SHORTEST_SEQUENCES if occasion.q_bucket == SHORTEST else _SHORT_SEQUENCES


def every_default(dtype: DType, d_head: int) -> tuple[FlashForwardKernelConfig, ...]:
    """What `ampere_default` may choose for a dtype and head dimension, on any GPU and for any sequences but short ones;
    none for a head dimension without kernels of its own."""
    tables = (_FEW_ROWS, _TWO_STAGES, _MEDIUM_CAUSAL, _MEDIUM_FULL, _ONE_STAGE)
    return tuple(dict.fromkeys(_config(dtype, d_head, table) for table in tables if d_head in table))


def _config(dtype: DType, d_head: int, table: Mapping[int, str]) -> FlashForwardKernelConfig:
    return parse_kernel_name_into_config(f"({dtype.name}, {d_head}, {table[d_head]}")
