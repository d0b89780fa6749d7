"""A Hopper backward config and a variant as CUDA source."""

from __future__ import annotations

from dataclasses import fields

from flashwright.kernels.backward.hopper.config import HopperBackwardKernelConfig
from flashwright.kernels.backward.hopper.shapes import HopperBackwardShapes
from flashwright.kernels.backward.rows import dq_source, rows_source
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


def hopper_backward_source(config: HopperBackwardKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The backward kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "backward/hopper.cuh"\n',
        headers=(
            (SPECIALISATION_HEADER, specialisation(config, _constants(config, variant))),
            (PRODUCTS_HEADER, wgmma_products(config.dtype, _products(HopperBackwardShapes(config)))),
            *device_headers(),
        ),
        name_expression=config.kernel_name(),
        file_name="hopper_backward.cu",
    )


def hopper_rows_source(config: HopperBackwardKernelConfig, variant: AttentionVariant) -> KernelSource:
    return rows_source(config, _constants(config, variant))


def hopper_dq_source(config: HopperBackwardKernelConfig, variant: AttentionVariant) -> KernelSource:
    return dq_source(config, _constants(config, variant))


def _products(shapes: HopperBackwardShapes) -> list[Product]:
    config = shapes.config
    gradient_columns = config.d_head // shapes.parts
    return [
        Product(config.B_r // shapes.parts),  # S, dP
        Product(gradient_columns, A_in_registers=True, B_summed_over_rows=True),  # dV, with P in registers
        Product(gradient_columns, B_summed_over_rows=True),  # dK, dV
        Product(config.d_head // shapes.dQ_column_parts, A_summed_over_rows=True, B_summed_over_rows=True),  # dQ
    ]


def _constants(config: HopperBackwardKernelConfig, variant: AttentionVariant) -> dict[str, dict[str, Constant]]:
    shapes = HopperBackwardShapes(config)
    names = (
        "key_groups", "key_stages", "key_slots", "announces_tiles", "tile_stages", "turn_stages", "parts", "panels",
        "P_in_registers", "finds_again", "term_tiles", "together", "dQ_threads", "dQ_group_warps", "dQ_column_parts",
        "key_group_bytes", "query_bytes", "weight_stages", "weight_group_bytes", "dQ_part_bytes", "dQ_slots",
        "other_K_bytes", "terms_bytes", "K_offset", "V_offset", "Q_offset", "dO_offset", "dS_offset", "P_offset",
        "dQ_offset", "received_offset", "other_K_offset", "lse_offset", "dots_offset", "notes_offset", "tiles_offset",
        "takes_turns", "sends_turns", "turns_offset", "taken_turns_offset", "barriers_offset", "producer_registers",
        "consumer_registers",
    )  # fmt: skip
    return {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)},
        "variant": variant_constants(variant),
        "shape": {name: getattr(shapes, name) for name in names} | {"finishes_dQ": config.finishes_dQ},
    }
