"""The configuration of the decode kernel whose values are columns of the keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from flashwright.kernels.naming import check_field_types, cpp_literal
from flashwright.problem.dtypes import DType

D_HEADS = (576,)
D_VALUE = 512
"""Columns of the keys that may be values, from the first on."""
CONSUMERS = 2
"""Warpgroups that compute; one more copies."""
WARPS_PER_WARPGROUP = 4


@dataclass(frozen=True, order=True)
class LatentDecodeKernelConfig:
    """The knobs of the decode kernel of multi-head latent attention."""

    dtype: DType
    """Element type of all tensors; softmax, accumulation and partial results are fp32."""
    d_head: int = D_HEADS[0]
    """Columns of a key, of which up to 512 are its value."""
    B_r: int = 64
    """Packed rows of a tile: those of all heads of Q that share a head of keys."""
    B_c: int = 64
    """Keys of a step."""
    stages: int = 2
    """Steps whose keys are in shared memory or on their way to it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, [(field.name, field.type) for field in fields(self)])
        for name, allowed in (("d_head", D_HEADS), ("B_r", (64,)), ("B_c", (32, 64))):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}: {value} is not allowed; allowed: {', '.join(map(str, allowed))}")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages: {self.stages} is not allowed; allowed: 2 to 8")

    @property
    def n_warps(self) -> int:
        """Warps that compute."""
        return CONSUMERS * WARPS_PER_WARPGROUP

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that a multiprocessor computes at a time."""
        return 1

    def short_form(self) -> str:
        """One line with every field, e.g. `latent decode (BF16, 576, 64, 64): stages_2`."""
        return f"latent decode ({self.dtype.name}, {self.d_head}, {self.B_r}, {self.B_c}): stages_{self.stages}"

    __str__ = short_form

    def to_cpp_struct(self) -> str:
        """The config as a C++ aggregate initialiser, all fields in order."""
        return f"{type(self).__name__}{{{', '.join(cpp_literal(v) for v in self.values())}}}"

    def kernel_name(self) -> str:
        """The C++ name of the kernel, as a profiler shows it; `parse_config` reads it back."""
        return f"latent_decode_kernel<{self.to_cpp_struct()}>"

    def values(self) -> tuple[Any, ...]:
        """The field values in order."""
        return tuple(getattr(self, field.name) for field in fields(self))
