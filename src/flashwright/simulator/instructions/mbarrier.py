"""mbarrier: arrivals, expected bytes, and waits for phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..binding import Binder, Getter, check_operands
from ..memory.thread_memory import check_range
from ..memory.windows import WINDOW_BASE, WINDOW_BITS
from ..ptx.syntax import Address, Instruction, Operand, Sink
from ..ptx.types import TYPES
from ..registry import RESCHEDULE, Operation, instruction
from ..sync.mbarriers import MBARRIER_BYTES, PENDING_SHIFT, Mbarrier, Mbarriers
from .load_store import active_values

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

_SHARED_BASE = np.int64(WINDOW_BASE["shared"])


def bind_mbarrier(operand: Operand, bind: Binder, is_own: bool = False) -> Callable[[Wave], np.ndarray]:
    """Shared addresses of the mbarriers the active threads name, by a shared or a generic address.

    ``is_own``: of their own blocks.
    """
    get = bind.address(operand)

    def addresses(wave: Wave) -> np.ndarray:
        values = active_values(wave, get(wave))
        values = np.where(values >> WINDOW_BITS == _SHARED_BASE >> WINDOW_BITS, values - _SHARED_BASE, values)
        offsets = wave.shared.own_offsets(wave, values, "mbarrier") if is_own else wave.clusters.offsets(values)
        check_range(wave, "shared", offsets, MBARRIER_BYTES, "mbarrier", wave.shared.size)
        return values

    return addresses


def names_own_block(syntax: Instruction) -> bool:
    """Whether its address is one of ``.shared::cta``, which ``.shared`` alone means too."""
    return syntax.has("shared") or syntax.has("shared::cta")


def active_threads(wave: Wave) -> np.ndarray:
    return np.arange(wave.threads) if wave.lanes is None else wave.lanes


def _per_thread(syntax: Instruction, bind: Binder, values: int, act: Callable[..., None]) -> Operation:
    """``[address], value…``: ``act(mbarriers, thread, address, value…)`` for each active thread, in thread order."""
    check_operands(syntax, 1 + values)
    operands = syntax.operands
    get_addresses = bind_mbarrier(operands[0], bind, names_own_block(syntax))
    getters: list[Getter] = [bind.source(value, TYPES["u32"]) for value in operands[1:]]

    def execute(wave: Wave) -> int:
        pc = wave.pc
        columns = [get_addresses(wave), *(active_values(wave, np.asarray(get(wave))) for get in getters)]
        for thread, *row in zip(active_threads(wave), *columns, strict=True):
            act(wave.mbarriers, int(thread), *(int(item) for item in row))
        return pc + 1

    # Control: threads that waited may have become runnable.
    return Operation(execute, is_control=True)


@instruction("mbarrier.init")
def init(syntax: Instruction, bind: Binder) -> Operation:
    return _per_thread(syntax, bind, 1, Mbarriers.initialise)


@instruction("mbarrier.inval")
def inval(syntax: Instruction, bind: Binder) -> Operation:
    return _per_thread(syntax, bind, 0, Mbarriers.invalidate)


@instruction("mbarrier.expect_tx")
def expect_tx(syntax: Instruction, bind: Binder) -> Operation:
    return _per_thread(syntax, bind, 1, Mbarriers.expect_bytes)


@instruction("mbarrier.complete_tx")
def complete_tx(syntax: Instruction, bind: Binder) -> Operation:
    def complete(mbarriers: Mbarriers, thread: int, address: int, amount: int) -> None:
        mbarriers.complete_bytes(mbarriers.find(thread, address), amount)

    return _per_thread(syntax, bind, 1, complete)


@instruction("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(syntax: Instruction, bind: Binder) -> Operation:
    """``state, [address] {, count}``, or with .expect_tx ``state, [address], bytes``; no state for remote arrivals."""
    may_complete = not syntax.has("noComplete")
    drop = syntax.opcode.startswith("mbarrier.arrive_drop")
    expects = syntax.has("expect_tx")
    operands = list(syntax.operands)
    has_state = not isinstance(operands[0], Address)
    state = operands.pop(0) if has_state else Sink()
    get_addresses = bind_mbarrier(operands[0], bind, names_own_block(syntax))
    get_value = bind.source(operands[1], TYPES["u32"]) if len(operands) > 1 else None
    put = bind.active_destination(state, TYPES["b64"])

    def execute(wave: Wave) -> int:
        pc = wave.pc
        addresses = get_addresses(wave)
        threads = active_threads(wave)
        values = np.ones(threads.size, np.int64)
        if get_value is not None:
            values = active_values(wave, np.asarray(get_value(wave)))
        states = np.zeros(threads.size, np.uint64)
        for position, (thread, address, value) in enumerate(zip(threads, addresses, values, strict=True)):
            count, amount = (1, int(value)) if expects else (int(value), 0)
            states[position] = wave.mbarriers.arrive(int(thread), int(address), count, amount, drop, may_complete)
        put(wave, states)
        return pc + 1

    return Operation(execute, is_control=True)


@instruction("mbarrier.pending_count")
def pending_count(syntax: Instruction, bind: Binder) -> Execute:
    """Of a state that an arrival returned: the arrivals that were pending before it."""
    put = bind.destination(syntax.operands[0], TYPES["u32"])
    (get,) = bind.sources(syntax.operands[1:], TYPES["b64"])
    return lambda wave: put(wave, (get(wave) >> np.uint64(PENDING_SHIFT)).astype(np.uint32))


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def wait(syntax: Instruction, bind: Binder) -> Operation:
    """``p, [address], parity or state {, time limit}``.

    Threads whose phase is not complete wait for it, in both forms: being descheduled before the test is something
    hardware may do to any thread. They hear "not complete" only when nobody else can run (see `Mbarriers.time_out`),
    or where a launch asks for spurious failures.
    """
    by_parity = syntax.has("parity")
    get_addresses = bind_mbarrier(syntax.operands[1], bind, names_own_block(syntax))
    get_phase = bind.source(syntax.operands[2], TYPES["u32" if by_parity else "b64"])
    put = bind.destination(syntax.operands[0], TYPES["pred"])

    def execute(wave: Wave) -> int:
        pc = wave.pc
        mbarriers = wave.mbarriers
        fails = mbarriers.spurious_failures()
        if fails is not None:
            others = wave.active_mask & ~fails
            if others.any():  # they test by themselves
                wave.postpone(others)
                wave.scheduler.add(pc, others)
                wave.activate(fails)
            put(wave, np.zeros(wave.threads, bool))
            return pc + 1
        threads = active_threads(wave)
        addresses = get_addresses(wave)
        phases = active_values(wave, np.asarray(get_phase(wave)))
        if not by_parity:
            phases = phases & np.uint64((1 << PENDING_SHIFT) - 1)
        ready = np.zeros(wave.threads, bool)
        waiting = np.zeros(wave.threads, bool)
        for barrier, phase, members in _by_barrier(wave, threads, addresses, phases):
            parity = phase if by_parity else (barrier.parity if phase >= barrier.phase else barrier.parity ^ 1)
            if mbarriers.is_complete(barrier, parity):
                mbarriers.observe(barrier, members)
                ready[members] = True
            else:
                mbarriers.park(members, barrier, parity & 1, put)
                waiting[members] = True
        wave.postpone(waiting)
        if not ready.any():
            return RESCHEDULE
        if waiting.any():
            wave.activate(ready)
        put(wave, np.ones(wave.threads, bool))
        return pc + 1

    return Operation(execute, is_control=True)


def _by_barrier(
    wave: Wave, threads: np.ndarray, addresses: np.ndarray, phases: np.ndarray
) -> list[tuple[Mbarrier, int, np.ndarray]]:
    """The active threads grouped by the mbarrier and the phase they ask for."""
    keys = np.stack([wave.block_of_thread[threads], addresses, phases.astype(np.int64)])
    distinct, inverse = np.unique(keys, axis=1, return_inverse=True)
    inverse = inverse.ravel()
    found = []
    for number in range(distinct.shape[1]):
        members = threads[inverse == number]
        # One thread of each warp is enough to check the order of initialisation and use.
        barriers = [
            wave.mbarriers.find(int(thread), int(distinct[1, number]))
            for thread in members[np.unique(members // WARP_SIZE, return_index=True)[1]]
        ]
        found.append((barriers[0], int(distinct[2, number]), members))
    return found
