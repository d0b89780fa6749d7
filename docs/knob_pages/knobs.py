"""The knobs of each family in the order of the pages, what each is for, and the kernels that they are turned from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.hopper.explain import neighbours
from flashwright.kernels.forward.hopper.ladder import get_hopper_progression_configs
from flashwright.kernels.registry import tile_shapes
from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.knob_effects import Base, Turn, bases

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
    "ring_stages": "K and V in a ring: warps wait for copies, not for each other",
}
ORDER_KNOBS = (
    "Q_mma_load_K_tiles", "K_mma_load_K_tiles", "V_mma_load_K_tiles", "mma_double_buffer_loads", "assembler_reorders",
    "keep_order",
)  # fmt: skip
"""Those whose pages show the order of loads and products."""
HOPPER_KNOBS = {
    "dtype": "element type of Q, K, V and O",
    "d_head": "columns of Q, K, V and O",
    "B_r": "rows of Q and O per tile: 64 for each consumer warpgroup",
    "B_c": "rows of K and V per step",
    "kv_stages": "how many blocks of K and V the producer may be ahead",
    "overlaps_softmax": "a step's softmax during the product of the step before",
    "ping_pong": "warpgroups take turns at issuing products",
    "persistent": "as many thread blocks as multiprocessors, each with many tiles",
    "lazy_rescale": "rescale O only when a maximum has grown much",
    "guesses_maxima": "exponentials relative to a reference, without a search for maxima",
    "first_block_leads": "the first block of keys before the others, which follow from the last",
}
OTHER_D_HEADS = (64, 256)


@dataclass(frozen=True)
class KnobSet:
    """The knobs of one family, and their pages."""

    title: str
    folder: Path
    """Of the pages, relative to the root of the tree."""
    index: str
    """The heading of docs/README.md that lists them."""
    meanings: dict[str, str]
    bases: Callable[[], tuple[Base, ...]]
    arch: str
    keys: int
    """Rows of K and V in the simulated launch of one thread block."""


def hopper_bases() -> tuple[Base, ...]:
    """The ladder's third rung, the first with two consumer warpgroups, and its last."""
    rungs = get_hopper_progression_configs()
    return tuple(
        Base(name, config, tuple(_hopper_turns(config)))
        for name, config in {"early": rungs[2], "final": rungs[-1]}.items()
    )


def _hopper_turns(config: Any) -> Iterator[Turn]:
    """Every knob turned alone, including `dtype` and `d_head`, which change the problem."""
    other = DType.BF16 if config.dtype is DType.FP16 else DType.FP16
    changes: list[tuple[str, dict[str, Any]]] = [(f"dtype: {config.dtype.name} → {other.name}", {"dtype": other})]
    changes += [(f"d_head: {config.d_head} → {d_head}", {"d_head": d_head}) for d_head in OTHER_D_HEADS]
    for change, values in [*changes, *neighbours(config)]:
        (knob,) = values
        try:
            turned = replace(config, **values)
            tile_shapes(turned)
        except ValueError as problem:
            yield Turn(knob, change, None, str(problem))
        else:
            yield Turn(knob, change, turned)


AMPERE = KnobSet("Ampere", Path("docs/knobs"), "the-knobs", KNOBS, bases, "sm_90", keys=512)
HOPPER = KnobSet("Hopper", Path("docs/hopper_knobs"), "hoppers-knobs", HOPPER_KNOBS, hopper_bases, "sm_90a", keys=1024)


@dataclass(frozen=True)
class KnobValue:
    """A base kernel with one value of a knob: its own, or another."""

    base: Base
    value: str
    is_own: bool
    config: KernelConfig | None
    problem: str | None = None


def values_of(knob: str, only: str = "", of: KnobSet = AMPERE) -> Iterator[KnobValue]:
    """Of each base kernel, or of the one of that name: the knob's own value first, then its turns."""
    for base in of.bases():
        turns = base.turns_of(knob) if only in ("", base.name) else ()
        for index, turn in enumerate(turns):
            own, _, other = turn.change.removeprefix(f"{knob}: ").partition(" → ")
            if index == 0:
                yield KnobValue(base, own, True, base.config)
            yield KnobValue(base, other, False, turn.config, turn.problem)
