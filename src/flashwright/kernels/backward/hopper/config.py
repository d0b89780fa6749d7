"""The configuration of the Hopper family's backward kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from flashwright.kernels.naming import check_field_types, cpp_literal
from flashwright.problem.dtypes import DType

WARPGROUP_ROWS = 64
D_HEADS = (64, 128, 256)
MAX_STAGES = 4


@dataclass(frozen=True, order=True)
class HopperBackwardKernelConfig:
    """The knobs of the Hopper-family backward kernel."""

    dtype: DType
    """Element type of all tensors; products are summed in fp32."""
    d_head: int
    B_r: int
    """Rows of Q and dO per inner step."""
    B_c: int
    """Rows of K and V, and of dK and dV, per thread block."""
    n_consumers: int = 2
    """Warpgroups that compute."""
    Q_stages: int = 2
    """Blocks of Q in shared memory."""
    dO_stages: int = 2
    """Blocks of dO in shared memory."""
    P_in_registers: bool = True
    """P and dS are operands of dV and dK in the registers that hold them; only dQ reads dS in shared memory."""
    bulk_dQ: bool = False
    """dQ goes through shared memory, from where the copy engine adds it."""
    paired: bool = False
    """Two thread blocks exchange the gradients of their scores, and each adds half of the columns of dQ."""
    ordered: bool = False
    """Blocks of keys add to dQ in a fixed order, so that its bits are the same in every run."""
    persistent: bool = False
    """A thread block for each multiprocessor takes blocks of keys, one after the other. A pair takes two at a time."""
    keys_ahead: bool = False
    """Two blocks of K and V in shared memory: those of a persistent thread block's next tile are copied during this
    one's steps."""
    skips_masked: bool = False
    """A warpgroup leaves out the first step of a tile if a causal mask hides its keys from all queries of that step."""
    finishes_dQ: bool = False
    """Blocks of keys take turns at a block of dQ: the first writes over what is there, and the last rounds the sum. No
    kernel comes after, and the one before clears no sums."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, [(field.name, field.type) for field in fields(self)])
        allowed = {
            "d_head": D_HEADS,
            "B_r": (64, 128),
            "B_c": (64, 128, 192),
            "n_consumers": (1, 2, 3),
            "Q_stages": range(1, MAX_STAGES + 1),
            "dO_stages": range(1, MAX_STAGES + 1),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is not allowed; allowed: {', '.join(map(str, values))}"
                )

    @property
    def n_warps(self) -> int:
        """That compute."""
        return 4 * self.n_consumers

    def short_form(self) -> str:
        """One line with every field, e.g. `hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P`."""
        options = [f"stages_{self.Q_stages}_{self.dO_stages}"]
        options += [token for token, name in OPTIONS.items() if getattr(self, name)]
        head = f"({self.dtype.name}, {self.d_head}, {self.B_r}, {self.B_c}, {self.n_consumers})"
        return f"hopper backward {head}: {'+'.join(options)}"

    __str__ = short_form

    def to_cpp_struct(self) -> str:
        """The config as a C++ aggregate initialiser, all fields in order."""
        return f"{type(self).__name__}{{{', '.join(cpp_literal(v) for v in self.values())}}}"

    def kernel_name(self) -> str:
        """The C++ name of the kernel, as a profiler shows it; `parse_config` reads it back."""
        return f"hopper_backward_kernel<{self.to_cpp_struct()}>"

    def values(self) -> tuple[Any, ...]:
        """The field values in order."""
        return tuple(getattr(self, field.name) for field in fields(self))


OPTIONS = {
    "register_P": "P_in_registers",
    "bulk_dQ": "bulk_dQ",
    "paired": "paired",
    "ordered": "ordered",
    "persistent": "persistent",
    "keys_ahead": "keys_ahead",
    "skips_masked": "skips_masked",
    "finishes_dQ": "finishes_dQ",
}
"""Fields that are on or off, by their names in short forms."""
