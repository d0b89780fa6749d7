"""Hopper configs that are good by experience, for problems that nobody has tuned."""

from __future__ import annotations

from flashwright.hopper.config import HopperForwardKernelConfig, parse_hopper_config
from flashwright.kernel_configs import DType

_ALL = "overlap+ping_pong+persistent+lazy"
_WITHOUT_TURNS = "overlap+persistent+lazy"
_BEST = {
    64: f"192, 128): stages_2+{_ALL}",
    96: f"128, 128): stages_2+{_ALL}",
    128: f"128, 128): stages_2+{_ALL}",
    192: f"128, 96): stages_2+{_ALL}",
    256: f"128, 64): stages_2+{_ALL}",
}
_CAUSAL = {64: f"128, 128): stages_3+{_ALL}"}
_LONG_CAUSAL = {64: f"192, 96): stages_3+{_ALL}", 128: f"128, 128): stages_2+{_WITHOUT_TURNS}"}


def hopper_default(dtype: DType, d_head: int, *, causal: bool, long: bool) -> HopperForwardKernelConfig:
    """What was fastest on an H200 among the first that were tried; d_head 96 and 192 are like their neighbours."""
    tables = (_BEST, _CAUSAL if causal else {}, _LONG_CAUSAL if causal and long else {})
    choice = {d: text for table in tables for d, text in table.items()}[d_head]
    return parse_hopper_config(f"hopper ({dtype.name}, {d_head}, {choice}")
