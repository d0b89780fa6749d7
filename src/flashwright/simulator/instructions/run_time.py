"""Functions of the CUDA run time that a kernel may call without a body of theirs: printing, and failed assertions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..binding import Binder, SymbolAddress
from ..device_printf import formatted
from ..memory.generic import bytes_at, string_at
from ..memory.windows import CALL_PARAMETER_BASE, WINDOW_BASE
from ..ptx.syntax import Arguments, Instruction, Symbol
from ..registry import Operation

if TYPE_CHECKING:
    from ..wave import Wave


def _parameters(syntax: Instruction, bind: Binder) -> tuple[list[SymbolAddress], list[SymbolAddress]]:
    """Where the results and the arguments of a call are."""
    lists = [operand.elements for operand in syntax.operands if isinstance(operand, Arguments)]
    found = [[bind.symbol_of(item.name) for item in names if isinstance(item, Symbol)] for names in lists]
    return (found[0], found[1]) if isinstance(syntax.operands[0], Arguments) else ([], found[0])


def _address(parameter: SymbolAddress) -> int:
    """The generic address of a parameter, which is in a thread's own memory."""
    return parameter.offset - CALL_PARAMETER_BASE + WINDOW_BASE["local"]


def _value(wave: Wave, thread: int, parameter: SymbolAddress, size: int) -> int:
    return int.from_bytes(bytes_at(wave, thread, _address(parameter), size), "little")


def vprintf(syntax: Instruction, bind: Binder) -> Operation:
    """``(result), (format, packed arguments)``; prints thread by thread."""
    (result,), (text, packed) = _parameters(syntax, bind)

    def output_of(wave: Wave, thread: int) -> tuple[str, int]:
        start = _value(wave, thread, packed, 8)
        return formatted(
            string_at(wave, thread, _value(wave, thread, text, 8)),
            lambda offset, size: bytes_at(wave, thread, start + offset, size),
            lambda address: string_at(wave, thread, address),
        )

    def execute(wave: Wave) -> None:
        for thread in np.flatnonzero(wave.active_mask).tolist():
            printed, count = output_of(wave, thread)
            wave.print(printed)
            place = int(wave.local.thread_base[thread]) + result.offset - CALL_PARAMETER_BASE
            wave.local.store.bytes[place : place + 4] = np.frombuffer(count.to_bytes(4, "little"), np.uint8)

    return Operation(execute)


def assertfail(syntax: Instruction, bind: Binder) -> Operation:
    """``(condition, file, line, function, size of a character)``."""
    _, (condition, file, line, function, _) = _parameters(syntax, bind)

    def execute(wave: Wave) -> int:
        thread = int(np.flatnonzero(wave.active_mask)[0])
        what, where, who = (string_at(wave, thread, _value(wave, thread, x, 8)) for x in (condition, file, function))
        place = f"{where}:{_value(wave, thread, line, 4)}: {who}"
        wave.fault_thread("trap", f"{place}: assertion `{what}` failed", thread)

    return Operation(execute, is_control=True)


RUN_TIME_FUNCTIONS: dict[str, Callable[[Instruction, Binder], Operation]] = {
    "vprintf": vprintf,
    "__assertfail": assertfail,
}
