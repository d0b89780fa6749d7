"""The configuration of the Hopper family's decode kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from flashwright.kernels.naming import check_field_types, cpp_literal
from flashwright.problem.dtypes import DType

WARPGROUP_ROWS = 64
"""Rows of a warpgroup's product."""
WARPS_PER_WARPGROUP = 4
D_HEADS = (64, 128, 192, 256)


@dataclass(frozen=True, order=True)
class HopperDecodeKernelConfig:
    """The knobs of the Hopper-family decode kernel."""

    dtype: DType
    """Element type of all tensors; softmax, accumulation and partial results are fp32."""
    d_head: int
    B_r: int
    """Packed rows of a tile, 64 per consumer warpgroup: those of all heads of Q that share a head of K and V."""
    B_c: int
    """Keys of a step."""
    stages: int = 2
    """Steps whose keys and values are in shared memory or on their way to it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, [(field.name, field.type) for field in fields(self)])
        for name, allowed in (("d_head", D_HEADS), ("B_r", (64, 128)), ("B_c", tuple(range(16, 257, 16)))):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: {value} is not allowed; allowed: {', '.join(map(str, allowed))}")
        if not 2 <= self.stages <= 16:
            raise ValueError(f"stages: {self.stages} is not allowed; allowed: 2 to 16")

    @property
    def n_consumers(self) -> int:
        """Warpgroups that compute; one more warpgroup copies."""
        return self.B_r // WARPGROUP_ROWS

    @property
    def n_warps(self) -> int:
        """Warps that compute."""
        return WARPS_PER_WARPGROUP * self.n_consumers

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that a multiprocessor computes at a time."""
        return 1

    def short_form(self) -> str:
        """One line with every field, e.g. `hopper decode (BF16, 128, 128, 64): stages_5`."""
        return f"hopper decode ({self.dtype.name}, {self.d_head}, {self.B_r}, {self.B_c}): stages_{self.stages}"

    __str__ = short_form

    def to_cpp_struct(self) -> str:
        """The config as a C++ aggregate initialiser, all fields in order."""
        return f"{type(self).__name__}{{{', '.join(cpp_literal(v) for v in self.values())}}}"

    def kernel_name(self) -> str:
        """The C++ name of the kernel, as a profiler shows it; `parse_config` reads it back."""
        return f"hopper_decode_kernel<{self.to_cpp_struct()}>"

    def values(self) -> tuple[Any, ...]:
        """The field values in order."""
        return tuple(getattr(self, field.name) for field in fields(self))
