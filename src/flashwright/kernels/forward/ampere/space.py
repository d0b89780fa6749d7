"""Which Ampere configs are worth timing: the seed system's filter, the search space, and the promising part of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from flashwright.kernels.family import SearchSpace
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.registers import estimate
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes
from flashwright.problem.dtypes import DType

OLDEST_ARCH = "sm_80"
"""The oldest architecture of the family, which estimates are made for."""

# --- The filter ------------------------------------------------------------------------------------------------


def ampere_rejection_reason(cfg: FlashForwardKernelConfig) -> str | None:
    """Why a config is not worth timing: "rule: reason" with its numbers; None if it is kept."""
    unbuildable = _why_unbuildable(cfg)
    broken = _broken_rule(cfg)
    if broken is None:
        return unbuildable
    return broken if unbuildable else f"{broken}{_estimated(cfg, broken)}"


def _broken_rule(cfg: FlashForwardKernelConfig) -> str | None:
    """Which of the documents' six rules excludes a config. Rules 4, 5 and 6 judge registers by the shape of the block;
    the reason is the documents', and a kernel may have fewer registers than it says."""
    Q, K = cfg.Q_mma_load_K_tiles, cfg.K_mma_load_K_tiles
    if cfg.eager_load_blocks and not cfg.async_copy:
        return (
            "rule 1: eager_load_blocks is on and async_copy is off; "
            "starting a copy early hides its latency only if the copy is asynchronous"
        )
    if Q not in (0, K):
        return (
            f"rule 2: Q_mma_load_K_tiles = {Q} differs from K_mma_load_K_tiles = {K}; "
            "both are multiplied tile by tile, so a streamed Q must arrive in K's tiles"
        )
    if cfg.B_r == 64:
        if cfg.n_warps == 8:
            return "rule 3: B_r = 64 with n_warps = 8 leaves 8 rows per warp; an mma needs 16"
        if cfg.B_c == 32 and Q == 0:
            return (
                "rule 4: B_r = 64, B_c = 32 with Q_mma_load_K_tiles = 0; "
                "the documents exclude it: over the threshold of registers for 3 resident blocks"
            )
        if cfg.B_c == 64 and Q != 0:
            return f"rule 5: B_r = 64, B_c = 64 with Q_mma_load_K_tiles = {Q}; {_EXCLUDED_BY_SHAPE}"
    if cfg.B_r == 128 and Q == 0:
        return f"rule 6: B_r = 128 with Q_mma_load_K_tiles = 0; {_EXCLUDED_BY_SHAPE}"
    return None


_EXCLUDED_BY_SHAPE = "the documents exclude it: a check of register use by block shape, for which they give no figure"
_RULES_ABOUT_REGISTERS = ("rule 4", "rule 5", "rule 6")


def _estimated(cfg: FlashForwardKernelConfig, broken: str) -> str:
    """The facts of a config beside the documents' reason, where that is about registers."""
    if not broken.startswith(_RULES_ABOUT_REGISTERS):
        return ""
    return f". Estimated before compiling: {estimate(cfg, OLDEST_ARCH)}"


def _why_unbuildable(cfg: FlashForwardKernelConfig) -> str | None:
    """Why there is no kernel of a config."""
    try:
        ForwardKernelTileShapes(cfg)
    except ValueError as error:
        return str(error)
    return None


# --- The space -------------------------------------------------------------------------------------------------

AUTOTUNED_D_HEADS = (64, 128)
_BLOCK_SHAPES = tuple(product((64, 128), (32, 64, 128), (4, 8)))
_QK_LOAD_TILES = ((0, 0), (0, 2), (2, 2), (4, 4))
_V_LOAD_TILES = (0, 2)
# The later optimisations, in the combinations worth trying: each pays most on top of the one before.
_STYLES: tuple[dict[str, Any], ...] = (
    {},
    {"mma_row_sum": True, "lazy_rescale": True},
    {"mma_row_sum": True, "lazy_rescale": True, "two_kv_stages": True, "reversed_kv": True},
)
_WIDE_STYLES: tuple[dict[str, Any], ...] = (*_STYLES, {"lazy_rescale": True})
"""Beyond 128 columns, registers are so scarce that a row sum's column of ones may cost more than it saves."""
_ACCUMULATORS_THAT_FIT = 240
"""fp32 accumulators of S and O per thread that leave registers for operands and addresses, of 255."""
_ACCUMULATORS_THAT_FIT_REORDERED = 160
"""The same when the assembler reorders, which keeps more values alive at once; with two stages, fewer."""


def get_autotuning_kernel_configs(
    dtype: DType | str | None = None, d_head: int | None = None
) -> list[FlashForwardKernelConfig]:
    """The search space: every config worth timing, of one or all dtypes and of one or both seed head dimensions."""
    dtypes = tuple(DType) if dtype is None else (DType.parse(dtype),)
    d_heads = AUTOTUNED_D_HEADS if d_head is None else (d_head,)
    return [config for some in product(dtypes, d_heads) for config in _worth_timing(*some)]


@cache
def _worth_timing(dtype: DType, d_head: int) -> tuple[FlashForwardKernelConfig, ...]:
    return tuple(config for config, reason in search_space(dtype, d_head) if reason is None)


def search_space(dtype: DType, d_head: int) -> Iterator[tuple[FlashForwardKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing ("rule: reason"), or None if it is."""
    styles = _WIDE_STYLES if _is_wide(d_head) else _STYLES
    knobs = product(_BLOCK_SHAPES, _QK_LOAD_TILES, _V_LOAD_TILES, (False, True), styles, (False, True))
    for (B_r, B_c, n_warps), (Q, K), V, buffer, style, reorder in knobs:
        config = FlashForwardKernelConfig(
            dtype, d_head, B_r, B_c, n_warps, True, True, True, Q, K, V, buffer, True,
            assembler_reorders=reorder, **style,
        )  # fmt: skip
        yield config, _rejection_in_space(config) or _redundancy_in_space(config)


def _is_wide(d_head: int) -> bool:
    """Whether heads are wider than any that the filter's rules were made for."""
    return d_head > max(AUTOTUNED_D_HEADS)


def _rejection_in_space(cfg: FlashForwardKernelConfig) -> str | None:
    """Why a config cannot be good: the filter's rules, what cannot be built, and what leaves too few registers."""
    reason = _broken_rule(cfg)
    # Rules 4 and 5 are about three resident blocks and about a Q that fits in registers beside them: a wide head's does
    # not, and of its blocks there are two at most.
    if reason is not None and not (reason.startswith(("rule 4", "rule 5")) and _is_wide(cfg.d_head)):
        return reason
    if (reason := _why_unbuildable(cfg)) is not None:
        return reason
    if (accumulators := _accumulators(cfg)) > _ACCUMULATORS_THAT_FIT:
        return f"registers: S and O take {accumulators} registers of a thread; {_ACCUMULATORS_THAT_FIT} leave room"
    return None


def _redundancy_in_space(cfg: FlashForwardKernelConfig) -> str | None:
    """Why a config that may be good need not be timed: others stand for it."""
    K, V, buffer = cfg.K_mma_load_K_tiles, cfg.V_mma_load_K_tiles, cfg.mma_double_buffer_loads
    styled = cfg.lazy_rescale
    if buffer and K == V == 0:
        return "buffer: K and V are loaded as a whole; there is nothing to double-buffer"
    if styled and (K == 0 or (buffer and not _is_wide(cfg.d_head))):
        return "style: later optimisations are tried where loads are tiled and, up to d_head 128, not double-buffered"
    if cfg.assembler_reorders:
        one_way = styled and K == V == 2 and not buffer
        if not one_way:
            return "reorder: where the assembler orders loads, one way of writing them (2_2, unbuffered) stands for all"
        if cfg.B_r == 64 and cfg.d_head == 128:
            return "reorder: at 64 rows of 128 columns the assembler prefers one more resident block, and spills for it"
        if not cfg.two_kv_stages and _accumulators(cfg) > _ACCUMULATORS_THAT_FIT_REORDERED:
            return f"reorder: more than {_ACCUMULATORS_THAT_FIT_REORDERED} accumulators leave the assembler no room"
    return None


def _accumulators(cfg: FlashForwardKernelConfig) -> int:
    """fp32 registers of a thread that hold S and O."""
    return cfg.B_r // cfg.n_warps * (cfg.B_c + cfg.d_head) // 32


# --- The promising part -----------------------------------------------------------------------------------------

SMALLEST_PROMISING_B_C = 64
WIDEST_CHEAP_D_HEAD = 128


def is_promising(config: FlashForwardKernelConfig) -> bool:
    """Whether a config has what the fastest had on an H200: the later optimisations, and large blocks.

    Of the ways to load the operands of wide heads, only the one that leaves most registers; and there a second stage
    makes up for small blocks.
    """
    if not config.lazy_rescale:
        return False
    if config.d_head <= WIDEST_CHEAP_D_HEAD:
        return config.B_c >= SMALLEST_PROMISING_B_C
    in_small_tiles = config.K_mma_load_K_tiles == config.V_mma_load_K_tiles == 2
    return in_small_tiles and (config.B_c >= SMALLEST_PROMISING_B_C or config.two_kv_stages)


# Up to two values may be spilled once a tile, around the loop, which need not be slower than smaller tiles.
SPACE = SearchSpace(
    search_space, is_promising, tuple(f"rule {number}" for number in range(1, 7)), bearable_spill_bytes=8
)
