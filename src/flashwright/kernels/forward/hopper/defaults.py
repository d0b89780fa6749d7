"""Hopper configs that are good by experience, for problems without a tuned result."""

from __future__ import annotations

from dataclasses import replace

from flashwright.kernels.family import Occasion
from flashwright.kernels.forward.hopper.config import HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.names import parse_hopper_config
from flashwright.problem.lengths import LONG, LONGEST, SHORT, SHORTEST

_ALL = "stages_2+overlap+ping_pong+persistent+lazy+guess"
_BEST = {
    64: "192, 128",
    96: "128, 128",
    128: "128, 128",
    192: "128, 96",
    256: "128, 64",
}
_SHORT_CAUSAL = {64: "128, 128"}


def hopper_default(occasion: Occasion) -> HopperForwardKernelConfig:
    """What was fastest on an H200 among the first that were tried; d_head 96 and 192 are like their neighbours."""
    short = occasion.q_bucket not in (LONG, LONGEST)
    tile = (_BEST | (_SHORT_CAUSAL if occasion.causal and short else {}))[occasion.d_head]
    config = parse_hopper_config(f"hopper ({occasion.dtype.name}, {occasion.d_head}, {tile}): {_ALL}")
    return replace(config, first_block_leads=_first_block_leads(occasion))


def _first_block_leads(occasion: Occasion) -> bool:
    """It costs one more step a tile that searches for maxima. On an H200, in bf16, scores that fall fast along the keys
    gain 12% to 33%. Normal ones lose 5% at most, 6% along the diagonal of 512 keys, but 12% there at d_head 64, whose
    steps are mostly softmax."""
    return occasion.d_head > 64 or not occasion.causal or occasion.kv_bucket in (LONG, LONGEST)


def suits_hopper(occasion: Occasion) -> bool:
    """Not a few rows on a few keys, of which a tile of 128 would be mostly empty. On 32k keys a whole tile of 128 took
    an H200 less than half the time of the other family's tile of 64."""
    return occasion.q_bucket not in (SHORTEST, SHORT) or occasion.kv_bucket in (LONG, LONGEST)
