"""A config and a variant as CUDA source: the headers of the package, specialised by a generated one.

Device code reads the constants of four namespaces: `cfg` (the config's fields), `shape` and `layout` (what
`tile_shapes` derived from them) and `variant` (what is computed).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any, ClassVar, Protocol

from flashwright.kernel_configs import DType, FlashForwardKernelConfig
from flashwright.tile_shapes import MMA_ROWS, VECTOR_BYTES, ForwardKernelTileShapes
from flashwright.variant import PLAIN, AttentionVariant

Constant = bool | int | DType
SPECIALISATION_HEADER = "specialisation.cuh"


@dataclass(frozen=True)
class KernelSource:
    """All that a compiler needs: a translation unit, the headers it includes, and the kernel's C++ name."""

    text: str
    headers: tuple[tuple[str, str], ...]
    name_expression: str
    file_name: str
    options: tuple[str, ...] = ()
    """Compiler options that this source asks for."""

    def flattened(self) -> str:
        """The same as one file: every header in the place of its first `#include`."""
        headers = dict(self.headers)
        seen: set[str] = set()

        def expand(name: str, text: str) -> list[str]:
            lines = [f"// ---- {name}"]
            for line in text.splitlines():
                include = re.match(r'#include "(.+)"', line)
                if include is None:
                    lines += [] if line == "#pragma once" else [line]
                elif include[1] not in seen:
                    seen.add(include[1])
                    lines += expand(include[1], headers[include[1]])
            return lines

        return "\n".join(expand(self.file_name, self.text)) + "\n"


def forward_kernel_source(config: FlashForwardKernelConfig, variant: AttentionVariant = PLAIN) -> KernelSource:
    """The forward kernel of a config; raises `ValueError` for a config no kernel can be built from."""
    shapes = ForwardKernelTileShapes(config)
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "ampere_forward.cuh"\n',
        headers=(
            (SPECIALISATION_HEADER, specialisation(config, _constants(config, shapes, variant))),
            *device_headers(),
        ),
        name_expression=config.kernel_name(),
        file_name="flash_forward.cu",
        # At -O3 the assembler orders shared-memory loads and products its own way, whatever the order in the PTX,
        # so that load tiles and double buffering hardly reach the machine code. At -O1 it keeps the order it is given.
        options=("--ptxas-options=-O3" if config.assembler_reorders else "--ptxas-options=-O1",),
    )


@cache
def device_headers() -> tuple[tuple[str, str], ...]:
    """The package's device code: (name as in `#include`, text), sorted by name."""
    root = resources.files("flashwright") / "cuda"
    found = [(path.name, path) for path in root.iterdir()]
    found += [(f"ptx/{path.name}", path) for path in (root / "ptx").iterdir()]
    return tuple(sorted((name, path.read_text("utf-8")) for name, path in found if name.endswith(".cuh")))


def _constants(
    config: FlashForwardKernelConfig, shapes: ForwardKernelTileShapes, variant: AttentionVariant
) -> dict[str, dict[str, Constant]]:
    layout = shapes.shared_layout
    return {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)}
        | {"guesses_maxima": False},  # another family's, with which this one shares its softmax
        "variant": variant_constants(variant),
        "layout": {
            "row_bytes": layout.row_bytes,
            "panel_vectors": layout.row_bytes // VECTOR_BYTES,
            "segment_vectors": layout.segment_vectors,
            "segments": layout.segments,
            "swizzle_mask": layout.swizzle_mask,
            "swizzle_shift": layout.swizzle_shift,
            "swizzle_period_rows": layout.swizzle_period_rows,
        },
        "shape": {
            "spreads_chains": False,  # it costs registers and 0.5% of the time
            "threads": shapes.threads,
            "QO_rows_per_warp": shapes.QO_rows_per_warp,
            "row_tiles": shapes.QO_rows_per_warp // MMA_ROWS,
            "QK_tiles": shapes.QK.tiles,
            "QK_steps_per_tile": shapes.QK.tile_fragments // 2,
            "QK_double_buffer": shapes.QK.DoubleBuffer,
            "Q_entire_block": shapes.QK.A_load_entire_block_into_rf,
            "Q_buffers": shapes.Q_rmem_tile_buffers,
            "K_entire_block": shapes.QK.B_load_entire_block_into_rf,
            "K_buffers": shapes.K_rmem_tile_buffers,
            "PV_tiles": shapes.PV.tiles,
            "PV_steps_per_tile": shapes.PV.tile_fragments // 2,
            "PV_double_buffer": shapes.PV.DoubleBuffer,
            "V_entire_block": shapes.PV.B_load_entire_block_into_rf,
            "V_buffers": shapes.V_rmem_tile_buffers,
            "K_shared_offset": shapes.K_shared_offset,
            "V_shared_offset": shapes.V_shared_offset,
            "KV_stage_bytes": shapes.KV_stage_bytes,
        },
    }


def variant_constants(variant: AttentionVariant) -> dict[str, Constant]:
    return {field.name: getattr(variant, field.name) for field in fields(variant)} | {
        "pads_columns": variant.pads_columns
    }


class Config(Protocol):
    """A family's config: a dataclass of constants."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def specialisation(config: Config, namespaces: dict[str, dict[str, Constant]]) -> str:
    """The generated header: the config's type, for the kernel's name, and what device code reads, by namespace."""
    members = " ".join(f"{_cpp_type(getattr(config, field.name))} {field.name};" for field in fields(config))
    lines = [
        f"// Generated for {config}",
        "#pragma once",
        f"enum class DType {{ {', '.join(f'{member.name} = {member.value}' for member in DType)} }};",
        f"struct {type(config).__name__} {{ {members} }};",
    ]
    for name, constants in namespaces.items():
        lines.append(f"namespace {name} {{")
        lines += [f"constexpr {_cpp_type(v)} {k} = {_cpp_literal(v)};" for k, v in constants.items()]
        lines.append("}")
    return "\n".join(lines) + "\n"


def _cpp_type(value: Constant) -> str:
    return "DType" if isinstance(value, DType) else type(value).__name__


def _cpp_literal(value: Constant) -> str:
    return value.to_cpp() if isinstance(value, DType) else str(value).lower()
