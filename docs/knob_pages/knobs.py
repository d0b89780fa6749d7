"""The knobs in the order of the pages, and what each is for in a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.workbench.bench.knob_effects import Base, bases

KNOBS = {
    "dtype": "element type of Q, K, V and O",
    "d_head": "columns of Q, K, V and O",
    "B_r": "rows of Q and O per thread block",
    "B_c": "rows of K and V per step of the loop",
    "n_warps": "warps per thread block",
    "async_copy": "global → shared by `cp.async`, past the registers",
    "eager_load_blocks": "start copies before they are needed",
    "swizzled": "permute 16-byte vectors so that loads meet no bank conflict",
    "Q_mma_load_K_tiles": "stream Q into registers, or hold it there",
    "K_mma_load_K_tiles": "how much of K is moved to registers at a time",
    "V_mma_load_K_tiles": "how much of V is moved to registers at a time",
    "mma_double_buffer_loads": "load the next register tile during this one's product",
    "optimized_softmax": "`exp2`, with the scale in one multiply-add",
    "peeled_first_step": "the first KV block outside of the loop",
    "reversed_kv": "KV blocks from the last to the first",
    "streaming_stores": "store O with the evict-first policy",
    "static_row_stride": "the distance between rows as a constant",
    "mma_row_sum": "row sums on the tensor cores",
    "two_kv_stages": "two K and two V blocks in shared memory",
    "lazy_rescale": "rescale O only when a maximum has grown much",
    "assembler_reorders": "assemble at `-O3` instead of `-O1`",
    "keep_order": "hold the assembler to the kernel's order of loads and products",
}
ORDER_KNOBS = (
    "Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles", "mma_double_buffer_loads", "assembler_reorders",
    "keep_order",
)  # fmt: skip
"""Those whose pages show the order of loads and products."""


@dataclass(frozen=True)
class KnobValue:
    """A base kernel with one value of a knob: its own, or another."""

    base: Base
    value: str
    is_own: bool
    config: FlashForwardKernelConfig | None
    problem: str | None = None


def values_of(knob: str, only: str = "") -> Iterator[KnobValue]:
    """Of each base kernel, or of the one of that name: the knob's own value first, then its turns."""
    for base in bases():
        turns = base.turns_of(knob) if only in ("", base.name) else ()
        for index, turn in enumerate(turns):
            own, _, other = turn.change.removeprefix(f"{knob}: ").partition(" → ")
            if index == 0:
                yield KnobValue(base, own, True, base.config)
            yield KnobValue(base, other, False, turn.config, turn.problem)
