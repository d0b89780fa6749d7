"""The documents' filter: which configs they would time, and the reason against each of the others."""

from __future__ import annotations

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.registers import estimate
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes

OLDEST_ARCH = "sm_80"
"""The oldest architecture of the family, which estimates are made for."""


def ampere_rejection_reason(cfg: FlashForwardKernelConfig) -> str | None:
    """Why a config is not worth timing: "rule: reason" with its numbers; None if it is kept."""
    unbuildable = why_unbuildable(cfg)
    broken = broken_rule(cfg)
    if broken is None:
        return unbuildable
    return broken if unbuildable else f"{broken}{_estimated(cfg, broken)}"


def broken_rule(cfg: FlashForwardKernelConfig) -> str | None:
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
            "a product has one tile width for both operands, the larger of the two"
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


def why_unbuildable(cfg: FlashForwardKernelConfig) -> str | None:
    """Why there is no kernel of a config."""
    try:
        ForwardKernelTileShapes(cfg)
    except ValueError as error:
        return str(error)
    return None
