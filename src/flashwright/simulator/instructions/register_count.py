"""setmaxnreg: the registers of a warpgroup."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..architecture import WARP_SIZE
from ..binding import Binder
from ..ptx.syntax import Immediate, Instruction
from ..registry import RESCHEDULE, Operation, Unsupported, instruction

if TYPE_CHECKING:
    from ..wave import Wave

_LOWEST, _HIGHEST, _UNIT = 24, 256, 8


@instruction("setmaxnreg")
def setmaxnreg(syntax: Instruction, bind: Binder) -> Operation:
    (count,) = syntax.operands
    assert isinstance(count, Immediate)
    registers = int(count.value)
    if registers % _UNIT or not _LOWEST <= registers <= _HIGHEST:
        raise Unsupported(f"{registers} registers; allowed: multiples of {_UNIT} from {_LOWEST} to {_HIGHEST}")
    increases = syntax.has("inc")

    def execute(wave: Wave) -> int:
        pc = wave.pc
        if not wave.warpgroups.gather():
            return RESCHEDULE
        if not increases:
            wave.register_pool.release(_warps(wave.active_mask), registers)
            return pc + 1
        mask = wave.active_mask
        served = np.zeros(wave.threads, bool)
        for group in np.unique(wave.warpgroups.active()):
            members = mask & (wave.warpgroups.of_thread == group)
            if wave.register_pool.acquire(_warps(members), registers):
                served |= members
            else:
                wave.postpone(members)
                wave.register_pool.park(members, registers)
        if not served.any():
            return RESCHEDULE
        wave.activate(served)
        return pc + 1

    return Operation(execute, is_control=True)


def _warps(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(mask.reshape(-1, WARP_SIZE)[:, 0])
