"""A latent decode config and a variant as CUDA source."""

from __future__ import annotations

from dataclasses import fields

from flashwright.kernels.decode.latent.config import CONSUMERS, LatentDecodeKernelConfig
from flashwright.kernels.decode.latent.shapes import LatentDecodeShapes
from flashwright.kernels.source import (
    SPECIALISATION_HEADER,
    KernelSource,
    device_headers,
    specialisation,
    variant_constants,
)
from flashwright.kernels.wgmma_products import PRODUCTS_HEADER, Product, wgmma_products
from flashwright.problem.variant import PLAIN, AttentionVariant


def latent_decode_source(config: LatentDecodeKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The decode kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    shapes = LatentDecodeShapes(config)
    products = (
        Product(config.B_c),
        Product(shapes.d_value // CONSUMERS, A_in_registers=True, B_summed_over_rows=True),
    )
    names = (
        "unit_keys", "Q_bytes", "K_bytes", "K_offset", "P_offset", "factors_offset", "terms_offset", "barriers_offset",
        "producer_registers", "consumer_registers",
    )  # fmt: skip
    constants = {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)}
        | {"d_value": shapes.d_value, "tiles_apart": True, "deals_items": False},
        "variant": variant_constants(variant) | {"value_head_dim": variant.value_head_dim},
        "layout": dict(shapes.shared_layout.constants()),
        "shape": {name: getattr(shapes, name) for name in names},
    }
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "decode/latent.cuh"\n',
        headers=(
            (SPECIALISATION_HEADER, specialisation(config, constants)),
            (PRODUCTS_HEADER, wgmma_products(config.dtype, products)),
            *device_headers(),
        ),
        name_expression=config.kernel_name(),
        file_name="latent_decode.cu",
    )
