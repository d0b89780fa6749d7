"""A Hopper config and a variant as CUDA source."""

from __future__ import annotations

from dataclasses import fields

from flashwright.kernels.forward.hopper.config import MAX_CONSUMERS, HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.schedule import MAX_LISTED_BLOCKS, MAX_LISTED_TILES
from flashwright.kernels.forward.hopper.shapes import TILE_STAGES, HopperTileShapes, blocks_with_care
from flashwright.kernels.source import (
    SPECIALISATION_HEADER,
    Constant,
    KernelSource,
    device_headers,
    specialisation,
    variant_constants,
)
from flashwright.kernels.wgmma_products import PRODUCTS_HEADER, Product, wgmma_products
from flashwright.problem.variant import PLAIN, AttentionVariant


def hopper_kernel_source(config: HopperForwardKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The forward kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    shapes = HopperTileShapes(config)
    # A window's left edge moves with the row: a tile's first block is the first of few of its rows.
    first_leads = config.first_block_leads and not variant.masks_left
    constants: dict[str, dict[str, Constant]] = {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)}
        | {"n_consumers": config.n_consumers},
        "variant": variant_constants(variant),
        "shape": {
            name: getattr(shapes, name)
            for name in (
                "panels",
                "half_block",
                "halves_first_block",
                "spreads_chains",
                "shares_dominance",
                "Q_stages",
                "Q_bytes",
                "KV_bytes",
                "K_offset",
                "V_offset",
                "Q_barriers_offset",
                "K_barriers_offset",
                "V_barriers_offset",
                "tile_barriers_offset",
                "tiles_offset",
                "producer_registers",
                "consumer_registers",
            )
        }
        | {
            "first_block_leads": first_leads,
            "blocks_with_care": blocks_with_care(config.B_c, first_leads=first_leads),
            # Where registers are few, or a mask's code needs them, addresses of K that the compiler keeps for the rare
            # step that is computed again cost every other step: 100 instructions before its products at d_head 256.
            "recomputes_addresses": first_leads and (config.n_consumers == MAX_CONSUMERS or variant.masks_right),
            "Q_offset": 0,
            "tile_stages": TILE_STAGES,
            "listed_blocks": MAX_LISTED_BLOCKS,
            "listed_tiles": MAX_LISTED_TILES,
        },
    }
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "forward/hopper.cuh"\n',
        headers=(
            (SPECIALISATION_HEADER, specialisation(config, constants)),
            (PRODUCTS_HEADER, wgmma_products(config.dtype, _products(shapes))),
            *device_headers(),
        ),
        name_expression=config.kernel_name(),
        file_name="hopper_forward.cu",
    )


def _products(shapes: HopperTileShapes) -> list[Product]:
    config = shapes.config
    score_columns = (config.B_c, shapes.half_block) if shapes.halves_first_block else (config.B_c,)
    scores = [Product(columns) for columns in score_columns]
    return [*scores, Product(config.d_head, A_in_registers=True, B_summed_over_rows=True)]
