"""The search spaces: the default one for everyday tuning, and the full one with every combination of the documents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

from flashwright.hardware.units import FRAGMENT
from flashwright.kernels.family import FullSpace, SearchSpace
from flashwright.kernels.forward.ampere.combinations import (
    ACCUMULATORS_THAT_FIT,
    AUTOTUNED_D_HEADS,
    BLOCK_SHAPES,
    accumulators,
    combinations,
)
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.defaults import every_default
from flashwright.kernels.forward.ampere.filter import ampere_rejection_reason
from flashwright.kernels.forward.ampere.ladder import get_kernel_progression_configs
from flashwright.problem.dtypes import DType


def get_autotuning_kernel_configs(
    dtype: DType | str | None = None, d_head: int | None = None, *, full: bool = False
) -> list[FlashForwardKernelConfig]:
    """The default search space, or the full one, of one or all dtypes and of one or both of the documents' head
    dimensions.

    The full space is every combination of the thirteen documented fields that `should_autotune_config` keeps and that a
    kernel can be built from, and all of the default space, which has later optimisations too. Both hold the ladder,
    three rungs of which the filter refuses.
    """
    dtypes = tuple(DType) if dtype is None else (DType.parse(dtype),)
    d_heads = AUTOTUNED_D_HEADS if d_head is None else (d_head,)
    kept = _kept_of_full if full else _kept_of_default
    return [config for some in product(dtypes, d_heads) for config in kept(*some)]


# --- The default space -------------------------------------------------------------------------------------------


def search_space(dtype: DType, d_head: int) -> Iterator[tuple[FlashForwardKernelConfig, str | None]]:
    """Every config that is considered, with why it is not worth timing ("rule: reason"), or None if it is."""
    always = dict.fromkeys(always_tried(dtype, d_head))
    for config, reason in combinations(dtype, d_head):
        yield config, None if config in always else reason
        always.pop(config, None)
    for config in always:
        yield config, None


def always_tried(dtype: DType, d_head: int) -> tuple[FlashForwardKernelConfig, ...]:
    """What a search tries whatever the filter says of it: every rung of the ladder (rule 5 refuses the fourth to the
    sixth, which stream Q at 64 × 64) and every default but those of short sequences. Their blocks are smaller than any
    of the documents; a search for short sequences times them as what is in use."""
    return tuple(dict.fromkeys((*get_kernel_progression_configs(dtype, d_head), *every_default(dtype, d_head))))


@cache
def _kept_of_default(dtype: DType, d_head: int) -> tuple[FlashForwardKernelConfig, ...]:
    return tuple(config for config, reason in search_space(dtype, d_head) if reason is None)


# --- The full space ----------------------------------------------------------------------------------------------


def full_space(dtype: DType, d_head: int) -> Iterator[tuple[FlashForwardKernelConfig, str | None]]:
    """Every combination of the thirteen documented fields, with the filter's reason against it, or None; then what else
    the default space has. What that has in spite of the filter, this has too."""
    default = dict.fromkeys(_kept_of_default(dtype, d_head))
    for config in _documented_combinations(dtype, d_head):
        yield config, None if config in default else ampere_rejection_reason(config)
        default.pop(config, None)
    for config in default:
        yield config, None


def _documented_combinations(dtype: DType, d_head: int) -> Iterator[FlashForwardKernelConfig]:
    switch, QK_tiles = (False, True), _load_tiles(d_head)
    for (B_r, B_c, n_warps), asynchronous, eager, swizzled in product(BLOCK_SHAPES, switch, switch, switch):
        for Q, K, V, buffer, softmax in product(QK_tiles, QK_tiles, _load_tiles(B_c), switch, switch):
            yield FlashForwardKernelConfig(
                dtype, d_head, B_r, B_c, n_warps, asynchronous, eager, swizzled, Q, K, V, buffer, softmax
            )


def _load_tiles(K: int) -> tuple[int, ...]:
    """0, and the powers of two from 2 to the fragments along K."""
    return (0, *(1 << power for power in range(1, (K // FRAGMENT).bit_length())))


def has_documented_values(config: FlashForwardKernelConfig) -> bool:
    """Whether the filter chooses among such values, of block shape and load tiles, whatever else the config has on."""
    QK_tiles = _load_tiles(config.d_head)
    return (
        (config.B_r, config.B_c, config.n_warps) in BLOCK_SHAPES
        and config.Q_mma_load_K_tiles in QK_tiles
        and config.K_mma_load_K_tiles in QK_tiles
        and config.V_mma_load_K_tiles in _load_tiles(config.B_c)
    )


@cache
def _kept_of_full(dtype: DType, d_head: int) -> tuple[FlashForwardKernelConfig, ...]:
    return tuple(config for config, reason in full_space(dtype, d_head) if reason is None)


# --- The promising part ------------------------------------------------------------------------------------------

SMALLEST_PROMISING_B_C = 64
WIDEST_CHEAP_D_HEAD = 128


def is_promising(config: FlashForwardKernelConfig) -> bool:
    """Whether a config has what the fastest had on an H200: the later optimisations, and large blocks that fit the
    registers.

    Of the ways to load the operands of wide heads, only the one that leaves most registers; and there a second stage
    makes up for small blocks.
    """
    if not config.lazy_rescale or accumulators(config) > ACCUMULATORS_THAT_FIT:
        return False
    if config.d_head <= WIDEST_CHEAP_D_HEAD:
        return config.B_c >= SMALLEST_PROMISING_B_C
    in_small_tiles = config.K_mma_load_K_tiles == config.V_mma_load_K_tiles == 2
    return in_small_tiles and (config.B_c >= SMALLEST_PROMISING_B_C or config.two_kv_stages)


# Up to two values may be spilled once a tile, around the loop, which need not be slower than smaller tiles.
SPACE = SearchSpace(
    search_space,
    is_promising,
    tuple(f"rule {number}" for number in range(1, 7)),
    bearable_spill_bytes=8,
    full=FullSpace(full_space, has_documented_values),
)
