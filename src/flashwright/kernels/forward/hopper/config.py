"""How the Hopper kernel computes: its configuration and the names of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from flashwright.kernels.naming import check_field_types
from flashwright.problem.dtypes import DType

WARPGROUP_ROWS = 64
"""Rows of a warpgroup's product."""
WARPS_PER_WARPGROUP = 4
MAX_CONSUMERS = 3
MAX_PRODUCT_COLUMNS = 256
D_HEADS = (64, 96, 128, 192, 256)


@dataclass(frozen=True, order=True)
class HopperForwardKernelConfig:
    """The knobs of the Hopper-family forward kernel."""

    dtype: DType
    """Element type of Q, K, V, O; softmax and accumulation are always fp32."""
    d_head: int
    B_r: int
    """Rows of Q and O per tile: 64 per consumer warpgroup."""
    B_c: int
    """Rows of K and V per step."""
    kv_stages: int = 1
    """K and V blocks in shared memory: the producer copies up to so many ahead of the products."""
    overlaps_softmax: bool = False
    """A step's softmax runs while the previous step's O += PV does."""
    ping_pong: bool = False
    """Consumer warpgroups take turns at issuing products, so that one's run during another's softmax."""
    persistent: bool = False
    """As many thread blocks as the GPU has multiprocessors, each computing many tiles; the producer runs ahead."""
    lazy_rescale: bool = False
    """Rescale O only when a row's maximum has grown by more than 2^40 in the exponential (2^15 in fp16), or when a key
    dominates the row: sums are of exponentials before rounding."""
    guesses_maxima: bool = False
    """Take exponentials relative to a reference found in a row's first keys, without a search for maxima. Where sums
    grow large, the reference is lifted by a power of two; where exponentials overflow, the scores are computed again,
    and the rest of the tile searches."""
    first_block_leads: bool = False
    """Visit the first block of keys before the others, which follow from the last to the second: references come from
    both ends of a row, so that none is overtaken by scores that rise or fall along the keys. Windows with a left edge
    have no block that leads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, ((field.name, field.type) for field in fields(self)))
        if self.d_head not in D_HEADS:
            raise ValueError(f"d_head: {self.d_head} is not allowed; allowed: {', '.join(map(str, D_HEADS))}")
        rows = [WARPGROUP_ROWS * n for n in range(1, MAX_CONSUMERS + 1)]
        if self.B_r not in rows:
            raise ValueError(f"B_r: {self.B_r} is not allowed; allowed: {', '.join(map(str, rows))}")
        if not 0 < self.B_c <= MAX_PRODUCT_COLUMNS or self.B_c % 16:
            raise ValueError(
                f"B_c: {self.B_c} is not allowed; allowed: positive multiples of 16 up to {MAX_PRODUCT_COLUMNS}"
            )
        if self.kv_stages < 1:
            raise ValueError(f"kv_stages: {self.kv_stages} is not allowed; allowed: 1 or more")
        if self.ping_pong and self.n_consumers == 1:
            raise ValueError(f"ping_pong: one consumer warpgroup (B_r = {self.B_r}) has nobody to take turns with")
        if self.overlaps_softmax and self.kv_stages < 2:
            raise ValueError("overlaps_softmax: needs kv_stages of at least 2; the next K is read before this V")
        if self.guesses_maxima and not (self.overlaps_softmax and self.lazy_rescale):
            raise ValueError(
                "guesses_maxima: needs overlaps_softmax and lazy_rescale; a guess is that O need not be rescaled"
            )
        if self.first_block_leads and not self.guesses_maxima:
            raise ValueError("first_block_leads: needs guesses_maxima; a search finds maxima in any order")
        skipped = -(-(self.B_r - WARPGROUP_ROWS) // self.B_c)
        if self.first_block_leads and skipped > self.kv_stages:
            raise ValueError(
                f"first_block_leads: needs kv_stages of at least {skipped}; along a diagonal a warpgroup skips up to "
                f"{skipped} blocks of {self.B_c} keys behind the first, whose V it keeps (B_r = {self.B_r})"
            )
        object.__setattr__(self, "_hash", hash(self.values()))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @property
    def n_consumers(self) -> int:
        """Warpgroups that compute; one more warpgroup copies."""
        return self.B_r // WARPGROUP_ROWS

    @property
    def n_warps(self) -> int:
        """Warps that compute."""
        return WARPS_PER_WARPGROUP * self.n_consumers

    def short_form(self) -> str:
        """One line with every field, e.g. `hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong`."""
        options = [f"stages_{self.kv_stages}", *(token for token, name in OPTIONS.items() if getattr(self, name))]
        return f"hopper ({self.dtype.name}, {self.d_head}, {self.B_r}, {self.B_c}): {'+'.join(options)}"

    __str__ = short_form

    def to_cpp_struct(self) -> str:
        """The config as a C++ aggregate initialiser, all fields in order."""
        values = (v.to_cpp() if isinstance(v, DType) else str(v).lower() for v in self.values())
        return f"{type(self).__name__}{{{', '.join(values)}}}"

    def kernel_name(self) -> str:
        """The C++ name of the kernel, as a profiler shows it; `parse_hopper_config` reads it back."""
        return f"hopper_forward_kernel<{self.to_cpp_struct()}>"

    def values(self) -> tuple[Any, ...]:
        """The field values in order."""
        return tuple(getattr(self, field.name) for field in fields(self))


OPTIONS = {
    "overlap": "overlaps_softmax",
    "ping_pong": "ping_pong",
    "persistent": "persistent",
    "lazy": "lazy_rescale",
    "guess": "guesses_maxima",
    "first": "first_block_leads",
}
