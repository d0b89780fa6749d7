"""An Ampere decode config and a variant as CUDA source."""

from __future__ import annotations

from dataclasses import fields

from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.shapes import AmpereDecodeShapes
from flashwright.kernels.decode.append import append_source
from flashwright.kernels.source import (
    SPECIALISATION_HEADER,
    Constant,
    KernelSource,
    device_headers,
    specialisation,
    variant_constants,
)
from flashwright.problem.variant import PLAIN, AttentionVariant


def ampere_decode_source(config: AmpereDecodeKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The decode kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    constants = _constants(config, variant)
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "decode/ampere.cuh"\n',
        headers=((SPECIALISATION_HEADER, specialisation(config, constants)), *device_headers()),
        name_expression=config.kernel_name(),
        file_name="ampere_decode.cu",
    )


def ampere_append_source(config: AmpereDecodeKernelConfig, variant: AttentionVariant) -> KernelSource:
    return append_source(config, _constants(config, variant))


def _constants(config: AmpereDecodeKernelConfig, variant: AttentionVariant) -> dict[str, dict[str, Constant]]:
    shapes = AmpereDecodeShapes(config)
    names = (
        "threads", "key_warps", "unit_keys", "row_tiles", "chunk_bytes", "Q_bytes", "stages_offset",
        "results_in_stages", "results_offset", "terms_offset",
    )  # fmt: skip
    return {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)}
        | {"d_value": config.d_head, "tiles_apart": False, "deals_items": True},
        "variant": variant_constants(variant) | {"value_head_dim": variant.value_head_dim},
        "layout": dict(shapes.shared_layout.constants()),
        "shape": {name: getattr(shapes, name) for name in names},
    }
