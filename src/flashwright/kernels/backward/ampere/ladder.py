"""The climb from the plainest kernel of the Ampere backward to its fastest, one idea a rung."""

from __future__ import annotations

from typing import Any

from flashwright.hardware.architectures import architecture
from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.explain import register_phases
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.family import FamilyLadder
from flashwright.kernels.ladder import LadderRung, climbed
from flashwright.problem.dtypes import DType

ARCHITECTURES = ("sm_80", "sm_90")
MOST_OPERAND_REGISTERS = 220
"""Of a thread's 255; addresses and temporaries have the others. With more the kernels spill."""

_SERVES_TWICE = "a fragment of Q or dO serves twice the products"
_TWICE_THE_KEYS: dict[int, tuple[str, dict[str, Any]]] = {
    32: (f"32 keys for each warp: {_SERVES_TWICE}", {"B_c": 128}),
    64: (f"32 keys for each warp: {_SERVES_TWICE}; S and dP in slices", {"B_c": 128, "slices": 2}),
    128: (
        f"32 keys for each pair of warps: {_SERVES_TWICE}; P goes through shared memory",
        {"B_c": 128, "n_warps": 8, "parts": 2},
    ),
    256: (f"32 keys for each four warps: {_SERVES_TWICE}", {"parts": 4}),
}
"""The rung that gives a warp 32 keys, by head dimension."""
_LATE_DQ: tuple[str, dict[str, Any]] = (
    "dQ a step late: some warps multiply while others exponentiate",
    {"late_dQ": True},
)
"""A rung for d_head 256, where it was faster with and without a mask."""


def get_ampere_backward_progression(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[LadderRung[AmpereBackwardKernelConfig]]:
    """The ladder, each rung one idea above the last; without those that d_head leaves no registers or shared memory
    for."""
    pairs = d_head > 128
    base = AmpereBackwardKernelConfig(
        DType.parse(dtype),
        d_head,
        B_r=32,
        B_c=64,
        n_warps=8 if pairs else 4,
        parts=2 if pairs else 1,
        swizzled=False,
    )
    changes: list[tuple[str, dict[str, Any]]] = [
        ("base: asynchronous copies, dQ added in global memory", {}),
        ("swizzled shared memory", {"swizzled": True}),
        ("64 queries a step", {"B_r": 64}),
        *([_TWICE_THE_KEYS[d_head]] if d_head in _TWICE_THE_KEYS else []),
        *([_LATE_DQ] if d_head == 256 else []),
        ("two stages of Q: the next is copied during the step", {"Q_stages": 2}),
        ("two stages of dO", {"dO_stages": 2}),
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
