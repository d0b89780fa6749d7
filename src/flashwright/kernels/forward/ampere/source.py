"""An Ampere config and a variant as CUDA source."""

from __future__ import annotations

from dataclasses import fields

from flashwright.hardware.units import MMA_ROWS
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes
from flashwright.kernels.source import (
    SPECIALISATION_HEADER,
    Constant,
    KernelSource,
    device_headers,
    specialisation,
    variant_constants,
)
from flashwright.problem.variant import PLAIN, AttentionVariant


def forward_kernel_source(config: FlashForwardKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The forward kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    shapes = ForwardKernelTileShapes(config)
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "forward/ampere.cuh"\n',
        headers=(
            (SPECIALISATION_HEADER, specialisation(config, _constants(config, shapes, variant))),
            *device_headers(),
        ),
        name_expression=config.kernel_name(),
        file_name="flash_forward.cu",
        # The assembler orders shared-memory loads and products its own way at every level above -O0. At -O2 and -O3,
        # load tiles and double buffering hardly change what it makes of them; at -O1 they change it, and registers with
        # it. -O0 keeps the order, and takes five times the instructions: for that there is `keep_order`.
        options=("--ptxas-options=-O3" if config.assembler_reorders else "--ptxas-options=-O1",),
    )


def _constants(
    config: FlashForwardKernelConfig, shapes: ForwardKernelTileShapes, variant: AttentionVariant
) -> dict[str, dict[str, Constant]]:
    return {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)},
        "variant": variant_constants(variant),
        "layout": dict(shapes.shared_layout.constants()),
        "shape": {
            "threads": shapes.threads,
            "QO_rows_per_warp": shapes.QO_rows_per_warp,
            "row_tiles": shapes.QO_rows_per_warp // MMA_ROWS,
            "QK_tiles": shapes.QK.tiles,
            "QK_steps_per_tile": shapes.QK.mma_steps_per_tile,
            "QK_double_buffer": shapes.QK.DoubleBuffer,
            "Q_entire_block": shapes.QK.A_load_entire_block_into_rf,
            "Q_buffers": shapes.Q_rmem_tile_buffers,
            "K_entire_block": shapes.QK.B_load_entire_block_into_rf,
            "K_buffers": shapes.K_rmem_tile_buffers,
            "PV_tiles": shapes.PV.tiles,
            "PV_steps_per_tile": shapes.PV.mma_steps_per_tile,
            "PV_double_buffer": shapes.PV.DoubleBuffer,
            "V_entire_block": shapes.PV.B_load_entire_block_into_rf,
            "V_buffers": shapes.V_rmem_tile_buffers,
            "K_shared_offset": shapes.K_shared_offset,
            "V_shared_offset": shapes.V_shared_offset,
            "KV_stage_bytes": shapes.KV_stage_bytes,
            "KV_stages": shapes.KV_stages,
            "ring_barriers_offset": shapes.ring_barriers_offset,
            "steps_ahead": shapes.steps_ahead,
            "recomputes_copy_offsets": shapes.recomputes_copy_offsets,
        },
    }
