"""bar, barrier and fences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..binding import Binder
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES
from ..registry import RESCHEDULE, Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]


@instruction("bar", "barrier")
def barrier(syntax: Instruction, bind: Binder) -> Operation:
    modifiers = [m for m in syntax.modifiers if m != "cta"]
    action = modifiers[0]
    if action not in ("sync", "arrive", "red"):
        raise Unsupported(f"barrier action {action}")
    # `bar` is `barrier` with .aligned.
    aligned = syntax.root == "bar" or "aligned" in modifiers
    u32 = TYPES["u32"]
    operands = list(syntax.operands)
    result = operands.pop(0) if action == "red" else None
    vote = bind.predicate(operands.pop()) if action == "red" else None
    get_id = bind.source(operands[0], u32)
    get_count = bind.source(operands[1], u32) if len(operands) > 1 else None
    if action == "arrive" and get_count is None:
        raise Unsupported("barrier arrive without a thread count")
    finisher = _reduction(modifiers[1], result, bind) if action == "red" else None

    def execute(wave: Wave) -> int:
        if aligned and wave.mask is not None and not wave.convergence.gather(None, aligned=True):
            return RESCHEDULE
        ids = np.asarray(get_id(wave))
        if ids.ndim and wave.mask is not None:
            ids = np.where(wave.mask, ids, ids[wave.lanes[0]])  # type: ignore[index]
        counts = None if get_count is None else np.asarray(get_count(wave))
        if vote is None:
            return wave.barriers.sync(ids, counts, aligned, waits=action == "sync")
        votes = np.broadcast_to(vote(wave), (wave.threads,))
        assert finisher is not None
        return wave.barriers.sync(ids, counts, aligned, votes=votes, finish=finisher(wave))

    return Operation(execute, is_control=True)


def _reduction(name: str, target: Any, bind: Binder) -> Callable[[Wave], Callable[[np.ndarray, np.ndarray], None]]:
    """``bar.red``: popc, and, or over the predicates of all participants."""
    functions: dict[str, Callable[[np.ndarray], Any]] = {
        "popc": lambda votes: np.uint32(np.count_nonzero(votes)),
        "and": lambda votes: np.bool_(votes.all()),
        "or": lambda votes: np.bool_(votes.any()),
    }
    reduce = functions[name]
    result_type = TYPES["u32" if name == "popc" else "pred"]
    slot = bind.slot_of(target.name)
    raw = result_type.raw

    def finisher(wave: Wave) -> Callable[[np.ndarray, np.ndarray], None]:
        def finish(threads: np.ndarray, votes: np.ndarray) -> None:
            merged = wave.registers[slot.index].view(raw).copy()
            merged[threads] = reduce(votes)
            wave.registers[slot.index] = merged

        return finish

    return finisher


@instruction("barrier.cluster")
def cluster_barrier(syntax: Instruction, bind: Binder) -> Operation:
    """``barrier.cluster.arrive`` and ``.wait``, with .aligned for whole warps."""
    action = syntax.modifiers[1]
    if action not in ("arrive", "wait"):
        raise Unsupported(f"barrier.cluster.{action}")
    aligned, orders = syntax.has("aligned"), not syntax.has("relaxed")

    def execute(wave: Wave) -> int:
        if aligned and wave.mask is not None and not wave.convergence.gather(None, aligned=True):
            return RESCHEDULE
        if action == "wait":
            return wave.cluster_barriers.wait()
        pc = wave.pc
        wave.cluster_barriers.arrive(orders)
        return pc + 1

    return Operation(execute, is_control=True)


@instruction("bar.warp")
def bar_warp(syntax: Instruction, bind: Binder) -> Operation:
    """Lanes of a warp meet, and their memory accesses before it are ordered before those after it."""
    members = bind.source(syntax.operands[0], TYPES["b32"])

    def execute(wave: Wave) -> None:
        if wave.hazards is not None:
            wave.hazards.clocks.advance(_warps_of(wave))
            wave.hazards.clocks.meet(_warps_of(wave))

    return warp_synchronous(execute, members, aligned=False)


def _warps_of(wave: Wave) -> np.ndarray:
    if wave.mask is None:
        return np.arange(wave.warps)
    return np.flatnonzero(wave.mask.reshape(-1, WARP_SIZE).any(axis=1))


@instruction("membar", "fence")
def fence(syntax: Instruction, bind: Binder) -> Execute:
    """Memory is sequentially consistent here: a fence matters to what strong accesses around it hand over."""
    if syntax.has("proxy"):
        raise Unsupported("proxy fences other than .async and .alias")
    is_wide = not syntax.has("cta")

    def execute(wave: Wave) -> None:
        if wave.hazards is not None:
            wave.hazards.order.fence(_warps_of(wave))
        if wave.global_hazards is not None:
            wave.global_hazards.fence(_warps_of(wave), is_wide)

    return execute


@instruction("fence.proxy.alias")
def alias_fence(syntax: Instruction, bind: Binder) -> Execute:
    """Every memory location has one address here."""
    return lambda wave: None


@instruction("fence.proxy.async", "fence.mbarrier_init")
def proxy_fence(syntax: Instruction, bind: Binder) -> Execute:
    """Bulk copies and wgmma ordered after this see what the thread wrote to shared memory, or has seen there."""
    if syntax.has("global"):
        return lambda wave: None

    def execute(wave: Wave) -> None:
        if wave.hazards is not None and wave.hazards.parties.is_asynchronous:
            wave.hazards.clocks.fence_proxy(_warps_of(wave))

    return execute


@instruction("griddepcontrol")
def grid_dependency(syntax: Instruction, bind: Binder) -> Execute:
    """Launches run one after another: what this waits for has already ended."""
    return lambda wave: None
