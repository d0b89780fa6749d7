"""The configuration of the Ampere family's decode kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from flashwright.kernels.naming import check_field_types, cpp_literal
from flashwright.problem.dtypes import DType

MAX_WARPS = 16
MAX_BLOCKS = 8


@dataclass(frozen=True, order=True)
class AmpereDecodeKernelConfig:
    """The knobs of the Ampere-family decode kernel."""

    dtype: DType
    """Element type of all tensors; softmax, accumulation and partial results are fp32."""
    d_head: int
    B_r: int
    """Packed rows of a tile: those of all heads of Q that share a head of K and V."""
    keys_per_warp: int
    """Keys of a step that one warp computes with."""
    n_warps: int
    row_warps: int = 1
    """Warps that share the same keys, each with rows of its own."""
    stages: int = 2
    """Steps whose keys and values are in shared memory or on their way to it."""
    blocks_per_sm: int = 1
    """Thread blocks that a multiprocessor computes at a time: where one begins or ends, the others read on."""
    swizzled: bool = True
    """XOR-swizzle the shared-memory layout."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, [(field.name, field.type) for field in fields(self)])
        for name, of, most in (
            ("d_head", 32, 256), ("B_r", 16, 128), ("keys_per_warp", 16, 64), ("n_warps", 1, MAX_WARPS),
            ("row_warps", 1, MAX_WARPS),
        ):  # fmt: skip
            value = getattr(self, name)
            if value <= 0 or value % of or value > most:
                raise ValueError(f"{name}: {value} is not allowed; allowed: positive multiples of {of} up to {most}")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages: {self.stages} is not allowed; allowed: 2 to 8")
        if not 1 <= self.blocks_per_sm <= MAX_BLOCKS:
            raise ValueError(f"blocks_per_sm: {self.blocks_per_sm} is not allowed; allowed: 1 to {MAX_BLOCKS}")

    @property
    def B_c(self) -> int:
        """Keys of a step."""
        return self.n_warps // self.row_warps * self.keys_per_warp

    def short_form(self) -> str:
        """One line with every field, e.g. `ampere decode (BF16, 128, 16, 16, 8): rows_1+stages_2+blocks_1+swizzled`."""
        options = [f"rows_{self.row_warps}", f"stages_{self.stages}", f"blocks_{self.blocks_per_sm}"]
        options += [token for token, name in OPTIONS.items() if getattr(self, name)]
        head = f"({self.dtype.name}, {self.d_head}, {self.B_r}, {self.keys_per_warp}, {self.n_warps})"
        return f"ampere decode {head}: {'+'.join(options)}"

    __str__ = short_form

    def to_cpp_struct(self) -> str:
        """The config as a C++ aggregate initialiser, all fields in order."""
        return f"{type(self).__name__}{{{', '.join(cpp_literal(v) for v in self.values())}}}"

    def kernel_name(self) -> str:
        """The C++ name of the kernel, as a profiler shows it; `parse_config` reads it back."""
        return f"ampere_decode_kernel<{self.to_cpp_struct()}>"

    def values(self) -> tuple[Any, ...]:
        """The field values in order."""
        return tuple(getattr(self, field.name) for field in fields(self))


OPTIONS = {"swizzled": "swizzled"}
"""Fields that are on or off, by their names in short forms."""
