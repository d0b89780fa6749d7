"""The climb from the plainest kernel of the Hopper backward to its fastest, one idea a rung."""

from __future__ import annotations

from typing import Any

from flashwright.kernels.backward.hopper.config import HopperBackwardKernelConfig
from flashwright.kernels.family import FamilyLadder
from flashwright.kernels.ladder import LadderRung, climbed
from flashwright.problem.dtypes import DType

_TWO_WARPGROUPS = ("two consumer warpgroups: 128 keys a thread block", {"B_c": 128, "n_consumers": 2})
_P_IN_REGISTERS = ("P and dS are operands in registers: only dQ reads dS in shared memory", {"P_in_registers": True})
_FURTHER_AHEAD = ("three stages of Q: two steps ahead", {"Q_stages": 3})
_PERSISTENT = (
    "a thread block for each multiprocessor owns blocks of keys, one after the other",
    {"persistent": True},
)
_IN_PAIRS = ("two thread blocks exchange dS: each adds half of the columns of dQ for both", {"paired": True})
_CLIMBS: dict[int, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    64: (
        {"B_r": 64, "B_c": 64, "n_consumers": 1},
        [
            ("two consumer warpgroups: 128 queries a step, 128 keys", {"B_r": 128, "B_c": 128, "n_consumers": 2}),
            _P_IN_REGISTERS,
            _PERSISTENT,
            ("two blocks of K and V: the next ones are copied during the steps of these", {"keys_ahead": True}),
        ],
    ),
    128: (
        {"B_r": 64, "B_c": 64, "n_consumers": 1},
        [_TWO_WARPGROUPS, _P_IN_REGISTERS, _FURTHER_AHEAD, _PERSISTENT],
    ),
    # dK and dV of 64 keys fill the registers of two warpgroups, and the blocks the shared memory.
    256: ({"B_r": 64, "B_c": 64, "n_consumers": 2, "dO_stages": 1}, [_IN_PAIRS, _PERSISTENT]),
}
"""By d_head: the base, and what changes from rung to rung."""


def get_hopper_backward_progression(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[LadderRung[HopperBackwardKernelConfig]]:
    """The ladder, each rung one idea above the last."""
    if d_head not in _CLIMBS:
        raise ValueError(f"d_head: {d_head} is not allowed; allowed: {', '.join(map(str, _CLIMBS))}")
    fields, changes = _CLIMBS[d_head]
    base = HopperBackwardKernelConfig(DType.parse(dtype), d_head, P_in_registers=False, **fields)
    return climbed(base, [("base: bulk tensor copies and warpgroup products", {}), *changes])


LADDER = FamilyLadder(get_hopper_backward_progression, ("sm_90a",), peers=("sdpa-cudnn", "sdpa-fa2"))
