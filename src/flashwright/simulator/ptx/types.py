"""The fundamental types of PTX and the NumPy types that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

RAW_DTYPES: dict[int, np.dtype[Any]] = {
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
    128: np.dtype("V16"),  # only moved, never computed with
}


@dataclass(frozen=True)
class PtxType:
    """One PTX type: its name without the dot, its kind, its width, and the dtype its values are viewed as.

    Kinds: ``u`` unsigned, ``s`` signed, ``b`` untyped bits, ``f`` IEEE float, ``bf`` bfloat16 (held as raw
    16 bits), ``packed`` two 16-bit floats in 32 bits, ``pair`` two 16-bit integers or singles, ``pred`` a predicate.
    """

    name: str
    kind: str
    bits: int
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return self.bits // 8

    @property
    def raw(self) -> np.dtype[Any]:
        """The unsigned dtype of the same width: what a register of this type stores."""
        return self.dtype if self.kind == "pred" else RAW_DTYPES[self.bits]

    @property
    def is_float(self) -> bool:
        return self.kind in ("f", "bf", "packed")

    @property
    def is_signed(self) -> bool:
        return self.kind == "s"


def _all_types() -> dict[str, PtxType]:
    types = [PtxType("pred", "pred", 8, np.dtype(np.bool_))]
    for bits, raw in RAW_DTYPES.items():
        types.append(PtxType(f"b{bits}", "b", bits, raw))
        if raw.kind == "V":
            continue
        types.append(PtxType(f"u{bits}", "u", bits, raw))
        types.append(PtxType(f"s{bits}", "s", bits, np.dtype(f"int{bits}")))
    types += [PtxType(f"f{bits}", "f", bits, np.dtype(f"float{bits}")) for bits in (16, 32, 64)]
    types.append(PtxType("bf16", "bf", 16, np.dtype(np.uint16)))
    types.append(PtxType("tf32", "f", 32, np.dtype(np.float32)))
    types += [PtxType(name, "packed", 32, np.dtype(np.uint32)) for name in ("f16x2", "bf16x2")]
    types += [PtxType(name, "pair", 32, np.dtype(np.uint32)) for name in ("u16x2", "s16x2")]
    types.append(PtxType("f32x2", "pair", 64, np.dtype(np.uint64)))
    return {ptx_type.name: ptx_type for ptx_type in types}


TYPES = _all_types()


def ptx_type_of(dtype: np.dtype[Any]) -> PtxType:
    """The PTX type of numbers that NumPy calls ``dtype``."""
    if dtype.name == "bfloat16":
        return TYPES["bf16"]
    return TYPES[f"{dtype.kind.replace('i', 's')}{8 * dtype.itemsize}"]
