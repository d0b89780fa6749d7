"""The configuration of the Ampere family's backward kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from flashwright.kernels.naming import check_field_types, cpp_literal
from flashwright.problem.dtypes import DType

MAX_WARPS = 16


@dataclass(frozen=True, order=True)
class AmpereBackwardKernelConfig:
    """The knobs of the Ampere-family backward kernel."""

    dtype: DType
    """Element type of all tensors; products are summed in fp32."""
    d_head: int
    B_r: int
    """Rows of Q and dO per inner step."""
    B_c: int
    """Rows of K and V, and of dK and dV, per thread block."""
    n_warps: int
    Q_stages: int = 1
    """Blocks of Q in shared memory; with two, the next is copied while this one is computed with."""
    dO_stages: int = 1
    """The same of dO."""
    parts: int = 1
    """Warps that share keys, each with its part of the queries in S and dP, and of the columns in dK and dV."""
    slices: int = 1
    """A warp computes S and dP of its queries in so many slices, one after the other, to need fewer registers."""
    swizzled: bool = True
    """XOR-swizzle the shared-memory layout."""
    late_dQ: bool = False
    """dQ is computed a step late, from a second buffer of dS: some warps multiply while others exponentiate."""
    ordered: bool = False
    """Blocks of keys add to dQ in a fixed order, so that its bits are the same in every run."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, [(field.name, field.type) for field in fields(self)])
        for name, of, most in (("d_head", 32, 256), ("B_r", 16, 256), ("B_c", 16, 256), ("n_warps", 1, MAX_WARPS)):
            value = getattr(self, name)
            if value <= 0 or value % of or value > most:
                raise ValueError(f"{name}: {value} is not allowed; allowed: positive multiples of {of} up to {most}")
        for name in ("Q_stages", "dO_stages"):
            if getattr(self, name) not in (1, 2):
                raise ValueError(f"{name}: {getattr(self, name)} is not allowed; allowed: 1, 2")
        for name in COUNTS.values():
            if getattr(self, name) not in (1, 2, 4):
                raise ValueError(f"{name}: {getattr(self, name)} is not allowed; allowed: 1, 2, 4")

    def short_form(self) -> str:
        """One line with every field, counts of 1 apart, e.g. `ampere backward (BF16, 128, 64, 128, 8):
        stages_2_1+parts_2+swizzled`."""
        options = [f"stages_{self.Q_stages}_{self.dO_stages}"]
        options += [f"{token}_{getattr(self, name)}" for token, name in COUNTS.items() if getattr(self, name) != 1]
        options += [token for token, name in OPTIONS.items() if getattr(self, name)]
        head = f"({self.dtype.name}, {self.d_head}, {self.B_r}, {self.B_c}, {self.n_warps})"
        return f"ampere backward {head}: {'+'.join(options)}"

    __str__ = short_form

    def to_cpp_struct(self) -> str:
        """The config as a C++ aggregate initialiser, all fields in order."""
        return f"{type(self).__name__}{{{', '.join(cpp_literal(v) for v in self.values())}}}"

    def kernel_name(self) -> str:
        """The C++ name of the kernel, as a profiler shows it; `parse_config` reads it back."""
        return f"ampere_backward_kernel<{self.to_cpp_struct()}>"

    def values(self) -> tuple[Any, ...]:
        """The field values in order."""
        return tuple(getattr(self, field.name) for field in fields(self))


COUNTS = {"parts": "parts", "slices": "slices"}
"""Fields that are counts, by their names in short forms, where 1 is left out."""
OPTIONS = {"swizzled": "swizzled", "late_dQ": "late_dQ", "ordered": "ordered"}
"""Fields that are on or off, by their names in short forms."""
