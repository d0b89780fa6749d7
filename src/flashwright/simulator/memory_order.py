"""Order through shared memory itself: flags that one thread releases and another acquires.

A *strong* access (volatile, relaxed, acquire, release, atomic) does not race with another strong one. A release hands
over what its warp has done and seen so far, to whoever acquires the value. A relaxed access stands for either, together
with a fence on the right side of it: before a write that releases, after a read that acquires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .ptx.types import TYPES

if TYPE_CHECKING:
    from .hazards import WarpClocks
    from .ptx.syntax import Instruction
    from .wave import Wave


@dataclass(frozen=True)
class Ordering:
    """How a strong access orders those around it."""

    acquires: bool = False
    releases: bool = False
    is_wide: bool = True
    """Whether it is of gpu or system scope, not of its block's alone; in shared memory there is no difference."""
    is_flag: bool = True
    """Whether its value may say something about other memory; a relaxed floating-point number does not."""
    observes: bool = True
    """Whether its thread gets to know what was there."""
    is_sum: bool = False
    """Whether it adds a floating-point number: the order of additions shows in the last bits."""


RELAXED = Ordering()
_SEMANTICS = {
    "volatile": RELAXED,
    "relaxed": RELAXED,
    "mmio": RELAXED,
    "acquire": Ordering(acquires=True),
    "release": Ordering(releases=True),
    "acq_rel": Ordering(acquires=True, releases=True),
}
STRONG_MODIFIERS = frozenset(_SEMANTICS)


def ordered(syntax: Instruction, execute: Callable[[Wave], Any]) -> Callable[[Wave], Any]:
    """An access with the ordering that its modifiers name; without any, it is as it was."""
    is_atomic = syntax.root in ("atom", "red")
    default = RELAXED if is_atomic else None
    semantics = next((_SEMANTICS[modifier] for modifier in syntax.modifiers if modifier in _SEMANTICS), default)
    if semantics is None:
        return execute
    is_float = TYPES[syntax.modifiers[-1]].is_float
    ordering = replace(
        semantics,
        is_wide=not syntax.has("cta"),
        is_flag=semantics.acquires or semantics.releases or not is_float,
        observes=syntax.root != "red",
        is_sum=is_atomic and is_float and syntax.has("add"),
    )

    def run(wave: Wave) -> None:
        wave.ordering = ordering
        try:
            execute(wave)
        finally:
            wave.ordering = None

    return run


class Observations:
    """Strong writes that strong loads have found.

    PTX ISA, "Causality order": a write comes before what its observer does next. What the writer did before it is
    ordered by a release and an acquire alone.
    """

    def __init__(self, clocks: WarpClocks) -> None:
        self._clocks = clocks
        # By granule and warp: the record of the write that its last strong load found, and its stamp then.
        self._found: dict[int, dict[int, tuple[int, int]]] = {}

    def add(self, warps: np.ndarray, granules: np.ndarray, records: np.ndarray) -> None:
        """Threads of these warps find these writes, one each, by strong loads."""
        stamps = self._clocks.own()[warps]
        for warp, granule, *found in np.unique(np.stack([warps, granules, records, stamps]), axis=1).T.tolist():
            self._found.setdefault(granule, {})[warp] = found[0], found[1]

    def include(self, warps: np.ndarray, granules: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Which of these writes come before what these warps do now: they, or warps that they have seen since, found
        them."""
        triples = zip(warps.tolist(), granules.tolist(), records.tolist(), strict=True)
        return np.array([self._includes(*triple) for triple in triples], bool)

    def _includes(self, warp: int, granule: int, record: int) -> bool:
        return any(
            found == record and self._clocks.has_seen(warp, observer, stamp)
            for observer, (found, stamp) in self._found.get(granule, {}).items()
        )


class MemoryOrder:
    """What has been released in each granule of shared memory, and what warps hand over with their next strong access.

    Clocks are those of `hazards`.
    """

    def __init__(self, clocks: WarpClocks) -> None:
        self._clocks = clocks
        self._released: dict[int, np.ndarray] = {}  # by granule
        self._fenced: dict[int, np.ndarray] = {}  # by warp: what lies before its last fence
        self._read: dict[int, np.ndarray] = {}  # by warp: what was released in values that it has read, relaxed

    def fence(self, warps: np.ndarray) -> None:
        """A fence of memory by these warps."""
        for warp in warps.tolist():
            read = self._read.pop(warp, None)
            if read is not None:
                self._clocks.join([read], [warp])
            self._fenced[warp] = self._clocks.publish(warp)

    def read(self, ordering: Ordering, warps: np.ndarray, granules: np.ndarray) -> None:
        """Threads of these warps read these granules, one each, by strong accesses."""
        if not self._released:
            return
        for warp, granule in distinct_pairs(warps, granules):
            released = self._released.get(granule)
            if released is None:
                continue
            if ordering.acquires:
                self._clocks.join([released], [warp])
            else:
                known = [released, self._read[warp]] if warp in self._read else [released]
                self._read[warp] = self._clocks.latest(known)

    def write(self, ordering: Ordering, warps: np.ndarray, granules: np.ndarray, is_atomic: bool) -> None:
        """Threads of these warps write these granules, one each. An atomic write adds to what was released before."""
        if not (ordering.releases or self._released or self._fenced):
            return
        published: dict[int, np.ndarray] = {}
        for warp, granule in distinct_pairs(warps, granules):
            if ordering.releases and warp not in published:
                published[warp] = self._clocks.publish(warp)
            own = published.get(warp, self._fenced.get(warp))
            before = self._released.pop(granule, None)
            known = [clock for clock in (own, before if is_atomic else None) if clock is not None]
            if known:
                self._released[granule] = self._clocks.latest(known)


def distinct_pairs(warps: np.ndarray, granules: np.ndarray) -> Iterator[tuple[int, int]]:
    """The different (warp, granule) pairs."""
    pairs = np.unique(np.stack([granules, warps]), axis=1)
    yield from zip(pairs[1].tolist(), pairs[0].tolist(), strict=True)
