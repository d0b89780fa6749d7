"""Branches, calls, returns and exits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..binding import Binder
from ..ptx.syntax import Instruction, Register, Symbol
from ..ptx.types import TYPES
from ..registry import RESCHEDULE, Operation, instruction
from .run_time import RUN_TIME_FUNCTIONS

if TYPE_CHECKING:
    from ..wave import Wave


@instruction("bra")
def branch(syntax: Instruction, bind: Binder) -> Operation:
    # The guard has already split the group: who executes a branch takes it.
    (target,) = syntax.operands
    assert isinstance(target, Symbol)
    pc = bind.label_of(target.name)
    return Operation(lambda wave: pc, is_control=True, targets=(pc,))


@instruction("brx.idx")
def indexed_branch(syntax: Instruction, bind: Binder) -> Operation:
    index, targets = syntax.operands
    assert isinstance(targets, Symbol)
    get_index = bind.source(index, TYPES["u32"])
    destinations = np.array(bind.branch_targets(targets.name))

    def execute(wave: Wave) -> int:
        chosen = np.broadcast_to(get_index(wave), (wave.threads,))
        active = wave.active_mask
        for number in np.unique(chosen[active]):
            if number >= destinations.size:
                wave.fault("out-of-bounds", f"branch index {number} of {destinations.size} targets", 0)
            wave.scheduler.add(int(destinations[number]), active & (chosen == number))
        return RESCHEDULE

    return Operation(execute, is_control=True, targets=tuple(destinations.tolist()))


@instruction("exit")
def exit_thread(syntax: Instruction, bind: Binder) -> Operation:
    def execute(wave: Wave) -> int:
        wave.exit_group()
        return RESCHEDULE

    return Operation(execute, is_control=True, targets=())


@instruction("ret")
def return_(syntax: Instruction, bind: Binder) -> Operation:
    target = bind.return_target
    if target is None:
        return exit_thread(syntax, bind)  # type: ignore[return-value]
    return Operation(lambda wave: target, is_control=True, targets=(target,))


@instruction("call")
def call(syntax: Instruction, bind: Binder) -> Operation:
    """The callee's instructions follow; threads that do not call (by the guard) go around them."""
    names = [operand.name for operand in syntax.operands if isinstance(operand, Symbol)]
    if names and names[0] in RUN_TIME_FUNCTIONS:
        return RUN_TIME_FUNCTIONS[names[0]](syntax, bind)
    pointer = next((operand for operand in syntax.operands if isinstance(operand, Register)), None)
    if pointer is not None:
        return _indirect_call(pointer, bind)
    first = bind.pc + 1
    return Operation(lambda wave: first, is_control=True, skip_to=bind.call_end)


def _indirect_call(pointer: Register, bind: Binder) -> Operation:
    """The functions that the pointer may mean follow, one after the other."""
    get = bind.source(pointer, TYPES["u64"])
    callees = bind.callees

    def execute(wave: Wave) -> int:
        chosen, active = get(wave), wave.active_mask
        for address in np.unique(chosen[active]):
            members = active & (chosen == address)
            if int(address) not in callees:
                detail = "call through a pointer to no function of that many arguments and results, or to a caller"
                wave.fault_thread("unsupported", detail, int(np.flatnonzero(members)[0]), int(address))
            wave.scheduler.add(callees[int(address)], members)
        return RESCHEDULE

    return Operation(execute, is_control=True, skip_to=bind.call_end, targets=tuple(callees.values()))


@instruction("trap", "brkpt")
def trap(syntax: Instruction, bind: Binder) -> Operation:
    def execute(wave: Wave) -> int:
        wave.fault("trap", "the kernel stopped itself", 0)

    return Operation(execute, is_control=True)


@instruction("nanosleep", "pmevent", "prefetch", "prefetchu", "discard", "applypriority")
def hint(syntax: Instruction, bind: Binder) -> Operation:
    """Instructions that affect time only."""
    return Operation(lambda wave: None)
