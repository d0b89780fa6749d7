"""The combinations of knobs that everyday tuning considers, and why most of them are not worth timing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.filter import ampere_rejection_reason, why_unbuildable
from flashwright.problem.dtypes import DType

AUTOTUNED_D_HEADS = (64, 128)
BLOCK_SHAPES = tuple(product((64, 128), (32, 64, 128), (4, 8)))
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
_RULES_FOR_NARROW_HEADS = ("rule 4", "rule 5")
"""The documents made them for heads of 128 columns. The space of wider heads has configs that these rules, and so
`should_autotune_config`, refuse."""
ACCUMULATORS_THAT_FIT = 240
"""fp32 accumulators of S and O per thread that leave registers for operands and addresses, of 255."""
_ACCUMULATORS_THAT_FIT_REORDERED = 160
"""The same when the assembler reorders, which keeps more values alive at once; with two stages, fewer."""


def combinations(dtype: DType, d_head: int) -> Iterator[tuple[FlashForwardKernelConfig, str | None]]:
    """Every combination of the knobs' values, with why it is not worth timing ("rule: reason"), or None if it is."""
    styles = _WIDE_STYLES if _is_wide(d_head) else _STYLES
    knobs = product(BLOCK_SHAPES, _QK_LOAD_TILES, _V_LOAD_TILES, (False, True), styles, (False, True))
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
    reason = ampere_rejection_reason(cfg)
    if reason is not None and reason.startswith(_RULES_FOR_NARROW_HEADS) and _is_wide(cfg.d_head):
        reason = why_unbuildable(cfg)
    if reason is not None:
        return reason
    if (taken := accumulators(cfg)) > ACCUMULATORS_THAT_FIT:
        return f"registers: S and O take {taken} registers of a thread; {ACCUMULATORS_THAT_FIT} leave room"
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
        if not cfg.two_kv_stages and accumulators(cfg) > _ACCUMULATORS_THAT_FIT_REORDERED:
            return f"reorder: more than {_ACCUMULATORS_THAT_FIT_REORDERED} accumulators leave the assembler no room"
    return None


def accumulators(cfg: FlashForwardKernelConfig) -> int:
    """fp32 registers of a thread that hold S and O."""
    return cfg.B_r // cfg.n_warps * (cfg.B_c + cfg.d_head) // 32
