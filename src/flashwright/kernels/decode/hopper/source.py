"""A Hopper decode config and a variant as CUDA source."""

from __future__ import annotations

from dataclasses import fields

from flashwright.kernels.decode.append import append_source
from flashwright.kernels.decode.hopper.config import HopperDecodeKernelConfig
from flashwright.kernels.decode.hopper.shapes import HopperDecodeShapes
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


def hopper_decode_source(config: HopperDecodeKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The decode kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    scores = [Product(config.B_c, A_in_registers=in_registers) for in_registers in (False, True)]  # one of them is used
    products = [*scores, Product(config.d_head, A_in_registers=True, B_summed_over_rows=True)]
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "decode/hopper.cuh"\n',
        headers=(
            (SPECIALISATION_HEADER, specialisation(config, _constants(config, variant))),
            (PRODUCTS_HEADER, wgmma_products(config.dtype, products)),
            *device_headers(),
        ),
        name_expression=config.kernel_name(),
        file_name="hopper_decode.cu",
    )


def hopper_append_source(config: HopperDecodeKernelConfig, variant: AttentionVariant) -> KernelSource:
    return append_source(config, _constants(config, variant))


def _constants(config: HopperDecodeKernelConfig, variant: AttentionVariant) -> dict[str, dict[str, Constant]]:
    shapes = HopperDecodeShapes(config)
    names = (
        "unit_keys", "Q_bytes", "KV_bytes", "K_offset", "V_offset", "barriers_offset", "producer_registers",
        "consumer_registers", "Q_in_registers",
    )  # fmt: skip
    return {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)}
        | {
            "n_consumers": config.n_consumers,
            "blocks_per_sm": config.blocks_per_sm,
            "d_value": config.d_head,
            "tiles_apart": False,
            "deals_items": False,
        },
        "variant": variant_constants(variant) | {"value_head_dim": variant.value_head_dim},
        "layout": dict(shapes.shared_layout.constants()),
        "shape": {name: getattr(shapes, name) for name in names},
    }
