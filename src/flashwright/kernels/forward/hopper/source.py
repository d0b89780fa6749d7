"""A Hopper config and a variant as CUDA source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from flashwright.kernels.forward.hopper.config import HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.schedule import MAX_LISTED_BLOCKS, MAX_LISTED_TILES
from flashwright.kernels.forward.hopper.shapes import TILE_STAGES, HopperTileShapes
from flashwright.kernels.source import (
    SPECIALISATION_HEADER,
    Constant,
    KernelSource,
    device_headers,
    specialisation,
    variant_constants,
)
from flashwright.problem.dtypes import DType
from flashwright.problem.variant import PLAIN, AttentionVariant

PRODUCTS_HEADER = "wgmma_products.cuh"


def hopper_kernel_source(config: HopperForwardKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The forward kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    shapes = HopperTileShapes(config)
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
                "blocks_with_care",
                "spreads_chains",
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
            (PRODUCTS_HEADER, wgmma_products(config.dtype, _score_columns(shapes), config.d_head)),
            *device_headers(),
        ),
        name_expression=config.kernel_name(),
        file_name="hopper_forward.cu",
    )


def _score_columns(shapes: HopperTileShapes) -> tuple[int, ...]:
    return (shapes.config.B_c, shapes.half_block) if shapes.halves_first_block else (shapes.config.B_c,)


def wgmma_products(dtype: DType, score_columns: Sequence[int], output_columns: int) -> str:
    """The products of attention as functions. An instruction names each of its accumulator's registers, up to 128 of
    them, so that the text depends on their number."""
    functions = [
        *(_scores_products(dtype, columns) for columns in score_columns),
        _output_product(dtype, output_columns),
    ]
    return f"""// Generated: products of 64 rows, 16 deep (PTX: wgmma.mma_async).
#pragma once
#include "ptx/wgmma.cuh"

{"".join(functions)}"""


def _scores_products(dtype: DType, columns: int) -> str:
    return f"""// D = A·Bᵀ: both operands in shared memory. What D was before is not read.
DEVICE void wgmma_AB_shared(float (&d)[{columns // 8}][4], uint64 a, uint64 b) {{
    asm volatile("{{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, 0, 0;\\n"
                 "{_AB_shared(dtype, columns)}, accumulate, 1, 1, 0, 0;\\n}}"
                 : {_operands("=f", columns)}
                 : "l"(a), "l"(b));
}}

// D += A·Bᵀ.
DEVICE void wgmma_AB_shared_more(float (&d)[{columns // 8}][4], uint64 a, uint64 b) {{
    asm volatile("{_AB_shared(dtype, columns)}, 1, 1, 1, 0, 0;"
                 : {_operands("+f", columns)}
                 : "l"(a), "l"(b));
}}

"""


def _AB_shared(dtype: DType, columns: int) -> str:
    registers = columns // 2
    return f"{_instruction(dtype, columns)}{_registers(columns)}, %{registers}, %{registers + 1}"


def _output_product(dtype: DType, columns: int) -> str:
    return f"""// D += A·B: A in registers, B in shared memory.
DEVICE void wgmma_B_shared_transposed(float (&d)[{columns // 8}][4], const uint32 (&a)[4], uint64 b) {{
    asm volatile("{_instruction(dtype, columns)}"
                 "{_registers(columns)}, {{{_numbered(columns // 2, 4)}}}, %{columns // 2 + 4}, "
                 "1, 1, 1, 1;"
                 : {_operands("+f", columns)}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""


def _instruction(dtype: DType, columns: int) -> str:
    element = {DType.FP16: "f16", DType.BF16: "bf16"}[dtype]
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} "


def _numbered(first: int, count: int) -> str:
    return ", ".join(f"%{i}" for i in range(first, first + count))


def _registers(columns: int) -> str:
    return f"{{{_numbered(0, columns // 2)}}}"


def _operands(constraint: str, columns: int) -> str:
    return ", ".join(f'"{constraint}"(d[{n}][{i}])' for n in range(columns // 8) for i in range(4))
