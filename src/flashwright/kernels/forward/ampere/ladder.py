"""The climb from the plainest kernel of the Ampere family to its fastest, one idea a rung."""

from __future__ import annotations

from typing import Any

from flashwright.hardware.architectures import architecture
from flashwright.kernels.family import FamilyLadder
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes
from flashwright.kernels.ladder import LadderRung, climbed
from flashwright.problem.dtypes import DType

ARCHITECTURES_CLIMBED = ("sm_80", "sm_90")


def get_kernel_progression(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[LadderRung[FlashForwardKernelConfig]]:
    """The ladder, each rung one idea above the last.

    The first six are the documents'. Their filter refuses the fourth to the sixth, which stream Q at 64 × 64 (rule 5):
    up to 128 columns no search tries these. Two K/V stages are left out where they exceed the shared memory of an
    architecture that is climbed on: at 256 columns.
    """
    base = FlashForwardKernelConfig(DType.parse(dtype), d_head, 64, 64, 4, True, False, False, 0, 0, 0, False, False)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("base: asynchronous copies only", {}),
        ("swizzled shared memory", {"swizzled": True}),
        ("eager K/V loads", {"eager_load_blocks": True}),
        (
            "interleaved shared→register loads",
            {"Q_mma_load_K_tiles": 2, "K_mma_load_K_tiles": 2, "V_mma_load_K_tiles": 2},
        ),
        ("double-buffered shared→register loads", {"mma_double_buffer_loads": True}),
        ("optimised softmax", {"optimized_softmax": True}),
        ("autotuned blocks: 128 rows of Q", {"B_r": 128}),
        ("two K/V stages in shared memory", {"two_kv_stages": True}),
        ("lazy rescaling of O", {"lazy_rescale": True}),
        ("row sums on the tensor cores", {"mma_row_sum": True}),
        ("the assembler's order of instructions", {"assembler_reorders": True}),
    ]
    return climbed(base, changes, is_possible=_fits_everywhere)


def _fits_everywhere(config: FlashForwardKernelConfig) -> bool:
    most = min(architecture(arch).shared_bytes_per_block for arch in ARCHITECTURES_CLIMBED)
    return ForwardKernelTileShapes(config).shared_bytes <= most


def get_kernel_progression_configs(
    dtype: DType | str = DType.BF16, d_head: int = 128
) -> list[FlashForwardKernelConfig]:
    """The configs of the ladder, from the first rung to the last."""
    return [rung.config for rung in get_kernel_progression(dtype, d_head)]


LADDER = FamilyLadder(get_kernel_progression, architectures=ARCHITECTURES_CLIMBED, peers=("sdpa-fa2",))
