"""Hopper configs that are good by experience, for problems that nobody has tuned."""

from __future__ import annotations

from flashwright.hopper.config import HopperForwardKernelConfig, parse_hopper_config
from flashwright.kernel_configs import DType

_ALL = "stages_2+overlap+ping_pong+persistent+lazy+guess"
_BEST = {
    64: "192, 128",
    96: "128, 128",
    128: "128, 128",
    192: "128, 96",
    256: "128, 64",
}
_SHORT_CAUSAL = {64: "128, 128"}


def hopper_default(dtype: DType, d_head: int, *, causal: bool, long: bool) -> HopperForwardKernelConfig:
    """What was fastest on an H200 among the first that were tried; d_head 96 and 192 are like their neighbours."""
    tile = (_BEST | (_SHORT_CAUSAL if causal and not long else {}))[d_head]
    return parse_hopper_config(f"hopper ({dtype.name}, {d_head}, {tile}): {_ALL}")
