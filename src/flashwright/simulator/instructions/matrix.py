"""ldmatrix, stmatrix and movmatrix: 8×8 matrices of 16-bit elements.

Row r of matrix m is the 16 bytes at the address lane 8·m + r supplies. In registers, lane l holds the
elements (row l/4, columns 2·(l%4) and 2·(l%4)+1) of each matrix; with .trans, of its transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..architecture import WARP_SIZE
from ..binding import Binder, check_operands, elements_of
from ..ptx.syntax import Instruction
from ..ptx.types import TYPES
from ..registry import Operation, Unsupported, instruction
from ..sync.convergence import warp_synchronous
from .load_store import bind_location

if TYPE_CHECKING:
    from ..wave import Wave

_ROW_BYTES = 16
_ROWS = 8
_U16, _U32 = np.dtype(np.uint16), np.dtype(np.uint32)
_ROW_DTYPE = np.dtype("V16")


def full_warps(wave: Wave) -> int:
    """The number of active warps; a fault if one of them has lost lanes."""
    if wave.mask is None:
        return wave.warps
    by_warp = wave.mask.reshape(-1, WARP_SIZE)
    partial = by_warp.any(axis=1) & ~by_warp.all(axis=1)
    if partial.any():
        thread = int(np.flatnonzero(partial)[0]) * WARP_SIZE
        wave.fault_thread("barrier", "needs all 32 lanes of the warp", thread)
    return int(np.count_nonzero(by_warp[:, 0]))


def _parse(syntax: Instruction) -> tuple[int, bool]:
    if not syntax.has("m8n8") or not syntax.has("b16"):
        raise Unsupported("this matrix shape")
    count = next(int(m[1:]) for m in syntax.modifiers if m in ("x1", "x2", "x4"))
    return count, syntax.has("trans")


def _check_registers(found: int, count: int) -> None:
    if found != count:
        raise Unsupported(f"{found} registers; .x{count} needs {count}")


def _with_row_lanes(wave: Wave, count: int, access: Callable[[np.ndarray | slice], Any]) -> Any:
    """Call ``access`` with only the lanes active that supply rows: the first 8·count of each warp."""
    if count * _ROWS == WARP_SIZE:
        return access(slice(None))
    lane = wave.lane if wave.lanes is None else wave.lane[wave.lanes]
    positions = np.flatnonzero(lane < count * _ROWS)
    with wave.only(positions):
        return access(positions)


@instruction("ldmatrix")
def ldmatrix(syntax: Instruction, bind: Binder) -> Operation:
    count, transposed = _parse(syntax)
    space, get_address = bind_location(syntax, syntax.operands[1], _ROW_BYTES, bind)
    if space != "shared":
        raise Unsupported("ldmatrix outside of shared memory")
    check_operands(syntax, 2)
    setters = [bind.active_destination(target, TYPES["b32"]) for target in elements_of(syntax.operands[0])]
    _check_registers(len(setters), count)

    def execute(wave: Wave) -> None:
        warps = full_warps(wave)
        addresses = get_address(wave)
        if wave.mask is not None:
            addresses = addresses[wave.lanes]

        def read(positions: np.ndarray | slice) -> Any:
            view, index = wave.shared.locate(wave, addresses[positions], _ROW_BYTES, "load")
            return view[index]

        rows = _with_row_lanes(wave, count, read)
        matrices = rows.view(_U16).reshape(warps, count, _ROWS, _ROWS)
        if transposed:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        # [matrix, warp, row, pair of columns] = [register, thread]
        registers = np.ascontiguousarray(matrices.view(_U32).swapaxes(0, 1)).reshape(count, -1)
        for put, values in zip(setters, registers, strict=True):
            put(wave, values)

    return warp_synchronous(execute)


@instruction("stmatrix")
def stmatrix(syntax: Instruction, bind: Binder) -> Operation:
    count, transposed = _parse(syntax)
    space, get_address = bind_location(syntax, syntax.operands[0], _ROW_BYTES, bind)
    if space != "shared":
        raise Unsupported("stmatrix outside of shared memory")
    check_operands(syntax, 2)
    getters = [bind.source(source, TYPES["b32"]) for source in elements_of(syntax.operands[1])]
    _check_registers(len(getters), count)

    def execute(wave: Wave) -> None:
        warps = full_warps(wave)
        addresses = get_address(wave)
        registers = np.array([get(wave) for get in getters])
        if wave.mask is not None:
            addresses = addresses[wave.lanes]
            registers = registers[:, wave.lanes]
        matrices = np.ascontiguousarray(registers.reshape(count, warps, _ROWS, 4).swapaxes(0, 1)).view(_U16)
        if transposed:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        rows = matrices.view(_ROW_DTYPE).reshape(-1)

        def write(positions: np.ndarray | slice) -> None:
            view, index = wave.shared.locate(wave, addresses[positions], _ROW_BYTES, "store", rows)
            view[index] = rows

        _with_row_lanes(wave, count, write)

    return warp_synchronous(execute)


@instruction("movmatrix")
def movmatrix(syntax: Instruction, bind: Binder) -> Operation:
    """Transpose one matrix that is already in registers."""
    put = bind.destination(syntax.operands[0], TYPES["b32"])
    get = bind.source(syntax.operands[1], TYPES["b32"])

    def execute(wave: Wave) -> None:
        full_warps(wave)
        matrices = get(wave).view(_U16).reshape(-1, _ROWS, _ROWS)
        put(wave, np.ascontiguousarray(matrices.swapaxes(1, 2)).view(_U32).ravel())

    return warp_synchronous(execute)
