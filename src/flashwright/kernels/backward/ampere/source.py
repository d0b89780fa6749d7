"""An Ampere backward config and a variant as CUDA source."""

from __future__ import annotations

from dataclasses import fields

from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.backward.rows import dq_source, rows_source
from flashwright.kernels.source import (
    SPECIALISATION_HEADER,
    Constant,
    KernelSource,
    device_headers,
    specialisation,
    variant_constants,
)
from flashwright.problem.variant import PLAIN, AttentionVariant


def ampere_backward_source(config: AmpereBackwardKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The backward kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "backward/ampere.cuh"\n',
        headers=((SPECIALISATION_HEADER, specialisation(config, _constants(config, variant))), *device_headers()),
        name_expression=config.kernel_name(),
        file_name="ampere_backward.cu",
    )


def ampere_rows_source(config: AmpereBackwardKernelConfig, variant: AttentionVariant) -> KernelSource:
    return rows_source(config, _constants(config, variant))


def ampere_dq_source(config: AmpereBackwardKernelConfig, variant: AttentionVariant) -> KernelSource:
    return dq_source(config, _constants(config, variant))


def _constants(config: AmpereBackwardKernelConfig, variant: AttentionVariant) -> dict[str, dict[str, Constant]]:
    shapes = AmpereBackwardShapes(config)
    names = (
        "threads", "keys_per_warp", "row_tiles", "dQ_threads", "dQ_group_warps", "dQ_column_parts", "query_bytes",
        "weight_bytes", "dS_buffers", "K_offset", "V_offset", "Q_offset", "dO_offset", "dS_offset", "P_offset",
        "terms_offset",
    )  # fmt: skip
    return {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)},
        "variant": variant_constants(variant),
        "layout": dict(shapes.shared_layout.constants()),
        "shape": {name: getattr(shapes, name) for name in names} | {"finishes_dQ": False},
    }
