"""The configuration of the Ampere family's forward kernel.

A `FlashForwardKernelConfig` is a description. It can be written down whether or not a kernel can be built from
it (`shapes` decides that) and whether or not it is worth timing (`space` decides that).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from flashwright.kernels.naming import check_field_types, cpp_literal
from flashwright.problem.dtypes import DType
from flashwright.problem.shapes import MAX_D_HEAD

MAX_WARPS = 32
RING_STAGES = range(2, 9)


@dataclass(frozen=True, order=True)
class FlashForwardKernelConfig:
    """The knobs of the Ampere-family forward kernel.

    The first thirteen fields are the seed system's. Those after them are later optimisations; their defaults
    are zero, so a thirteen-field form means the same kernel with or without them.
    """

    dtype: DType
    """Element type of Q, K, V, O; softmax and accumulation are always fp32."""
    d_head: int
    B_r: int
    """Rows of Q and O per thread block."""
    B_c: int
    """Rows of K and V per inner step."""
    n_warps: int
    async_copy: bool
    """Copy global→shared by `cp.async`, not through registers."""
    eager_load_blocks: bool
    """Start V's copy before S = QKᵀ and the next K's before softmax, not when the block is needed."""
    swizzled: bool
    """XOR-swizzle the shared-memory layout."""
    Q_mma_load_K_tiles: int
    """8-wide fragments of Q moved to registers at a time; 0: the whole block at once, kept there."""
    K_mma_load_K_tiles: int
    V_mma_load_K_tiles: int
    mma_double_buffer_loads: bool
    """Two register buffers: tile t+1 is loaded while tile t is multiplied."""
    optimized_softmax: bool
    """exp2 with the scale folded into one fused multiply-add per score."""
    peeled_first_step: bool = False
    """The first KV block runs outside the loop, without rescaling an empty O and row sum."""
    reversed_kv: bool = False
    """Visit KV blocks from the last to the first."""
    streaming_stores: bool = False
    """Store O with the evict-first cache policy, because the kernel does not read it again."""
    static_row_stride: int = 0
    """Elements between consecutive rows of Q, K, V and O, known at compile time; 0: read at run time."""
    mma_row_sum: bool = False
    """Sum the exponentials on the tensor cores, as P times a column of ones, not by additions in fp32."""
    assembler_reorders: bool = False
    """Assemble at `-O3` instead of `-O1`. Both schedule loads and products their own way; see `keep_order`."""
    two_kv_stages: bool = False
    """Two K and two V blocks in shared memory: both of the next step are copied while this one is computed."""
    lazy_rescale: bool = False
    """Rescale O only when a row's maximum has grown by more than 2^40 in the exponential (2^15 in fp16), or when a key
    dominates the row, where sums are of exponentials before rounding (without `mma_row_sum`)."""
    keep_order: bool = False
    """Hold the assembler to the kernel's order of loads and products."""
    ring_stages: int = 0
    """Stages of a ring of K and V blocks, each guarded by two barriers in shared memory (mbarrier): a warp waits for
    the copies that it reads and for the stage that it refills, not for all warps. 0: barriers of the thread block."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, _FIELD_TYPES)
        self._check_values()
        # Configs are looked up on every call of a kernel; hashing all fields each time would cost more than that.
        object.__setattr__(self, "_hash", hash(self.values()))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def _check_values(self) -> None:
        self._require_multiple("d_head", of=16, at_most=MAX_D_HEAD)
        self._require_multiple("B_r", of=16)
        self._require_multiple("B_c", of=16)
        self._require_multiple("n_warps", of=1, at_most=MAX_WARPS)
        for name in ("Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"{name}: {getattr(self, name)} is negative; allowed: 0 (whole block), or a power of two from 2"
                )
        if self.ring_stages not in (0, *RING_STAGES):
            raise ValueError(
                f"ring_stages: {self.ring_stages} is not allowed; allowed: 0 (no ring), or {RING_STAGES[0]} to "
                f"{RING_STAGES[-1]}"
            )
        stride = self.static_row_stride
        if stride < 0 or stride % 8 or 0 < stride < self.d_head:
            raise ValueError(
                f"static_row_stride: {stride} is not a row stride in elements; allowed: 0 (run time), or a "
                f"multiple of 8 (16 bytes) from d_head = {self.d_head}"
            )

    def _require_multiple(self, name: str, *, of: int, at_most: int | None = None) -> None:
        value = getattr(self, name)
        if value <= 0 or value % of or (at_most is not None and value > at_most):
            limit = f" up to {at_most}" if at_most is not None else ""
            raise ValueError(f"{name}: {value} is not allowed; allowed: positive multiples of {of}{limit}")

    def short_form(self) -> str:
        """One line with every field, e.g. `(BF16, 128, 64, 64, 4): async+load_0_2_2_tiles+buffer`."""
        tiles = f"load_{self.Q_mma_load_K_tiles}_{self.K_mma_load_K_tiles}_{self.V_mma_load_K_tiles}_tiles"
        options = [token for token, name in _OPTIONS_BEFORE_TILES.items() if getattr(self, name)]
        options.append(tiles)
        options += [token for token, name in _OPTIONS_AFTER_TILES.items() if getattr(self, name)]
        options += [f"{token}_{value}" for token, name in NUMBERED_OPTIONS.items() if (value := getattr(self, name))]
        head = f"({self.dtype.name}, {self.d_head}, {self.B_r}, {self.B_c}, {self.n_warps})"
        return f"{head}: {'+'.join(options)}"

    __str__ = short_form

    def to_cpp_struct(self) -> str:
        """The config as a C++ aggregate initialiser, all fields in order."""
        return f"{type(self).__name__}{{{', '.join(cpp_literal(v) for v in self.values())}}}"

    def kernel_name(self) -> str:
        """The C++ name of the kernel, as a profiler shows it; `parse_kernel_name_into_config` reads it back."""
        return f"flash_forward_kernel<{self.to_cpp_struct()}>"

    def values(self) -> tuple[Any, ...]:
        """The field values in order."""
        return _field_values(self)


# Spaces are made of thousands of configs: what is the same for all of them is found out once.
_FIELD_TYPES = tuple((field.name, field.type) for field in fields(FlashForwardKernelConfig))
_field_values: Callable[[FlashForwardKernelConfig], tuple[Any, ...]] = attrgetter(*(name for name, _ in _FIELD_TYPES))

_OPTIONS_BEFORE_TILES = {"async": "async_copy", "eager": "eager_load_blocks", "swizzled": "swizzled"}
_OPTIONS_AFTER_TILES = {
    "buffer": "mma_double_buffer_loads",
    "opt_softmax": "optimized_softmax",
    "peeled": "peeled_first_step",
    "reversed": "reversed_kv",
    "streaming": "streaming_stores",
    "mma_sum": "mma_row_sum",
    "reorder": "assembler_reorders",
    "two_stages": "two_kv_stages",
    "lazy": "lazy_rescale",
    "keep_order": "keep_order",
}
OPTION_FIELDS = _OPTIONS_BEFORE_TILES | _OPTIONS_AFTER_TILES
NUMBERED_OPTIONS = {"stride": "static_row_stride", "ring": "ring_stages"}
"""Options that are written with a number behind them."""
