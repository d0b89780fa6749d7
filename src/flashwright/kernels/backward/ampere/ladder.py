"""The climb from the plainest kernel of the Ampere backward to its fastest, one idea a rung."""

from __future__ import annotations

from typing import Any

from flashwright.hardware.architectures import architecture
from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.explain import register_phases
from flashwright.kernels.backward.ampere.shapes import MMA_COLUMNS, TILES_PER_STORE, AmpereBackwardShapes
from flashwright.kernels.family import FamilyLadder
from flashwright.kernels.ladder import LadderRung, climbed
from flashwright.problem.dtypes import DType

ARCHITECTURES = ("sm_80", "sm_90")
MOST_OPERAND_REGISTERS = 220
"""Of a thread's 255; addresses and temporaries have the others. With more the kernels spill."""


def get_ampere_backward_progression(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[LadderRung[AmpereBackwardKernelConfig]]:
    """The ladder, each rung one idea above the last; without those that d_head leaves no registers or shared memory
    for."""
    two_share_keys = d_head // 2 % (TILES_PER_STORE * MMA_COLUMNS) == 0
    base = AmpereBackwardKernelConfig(
        DType.parse(dtype), d_head, B_r=32, B_c=64, n_warps=8 if two_share_keys else 4, swizzled=False
    )
    own_keys = "P and dS stay in registers: 128 keys, 16 of its own for each warp"
    changes: list[tuple[str, dict[str, Any]]] = [
        ("base: asynchronous copies, dQ added in global memory", {}),
        ("swizzled shared memory", {"swizzled": True}),
        ("64 queries a step", {"B_r": 64}),
        (own_keys if two_share_keys else "128 keys a thread block, 8 warps", {"B_c": 128, "n_warps": 8}),
        ("two stages of Q: the next is copied during the step", {"Q_stages": 2}),
        ("two stages of dO", {"dO_stages": 2}),
        ("128 queries a step", {"B_r": 128}),
    ]
    fitting: list[tuple[str, dict[str, Any]]] = []
    values: dict[str, Any] = {}
    for change, fields in changes:
        if _fits(base, values | fields):
            values |= fields
            fitting.append((change, fields))
    return climbed(base, fitting)


def _fits(base: AmpereBackwardKernelConfig, values: dict[str, Any]) -> bool:
    """Whether every architecture of the ladder runs such a kernel, without spilling its operands."""
    config = climbed(base, [("", values)])[0].config
    try:
        shapes = AmpereBackwardShapes(config)
    except ValueError:
        return False
    most = min(architecture(arch).shared_bytes_per_block for arch in ARCHITECTURES)
    operands = max(phase.total for phase in register_phases(config))
    return shapes.shared_bytes <= most and operands <= MOST_OPERAND_REGISTERS


LADDER = FamilyLadder(get_ampere_backward_progression, ARCHITECTURES, peers=("sdpa-fa2",))
