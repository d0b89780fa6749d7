"""ld and st of every width and vector form, in every state space."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..binding import Binder, Getter, data_type, elements_of
from ..memory.bytes import WIDTH_DTYPES
from ..memory.generic import split_by_space
from ..memory.windows import CALL_PARAMETER_BASE, CLUSTER_SHARED
from ..memory_order import ordered
from ..ptx.syntax import Instruction, Operand, Register
from ..ptx.types import PtxType
from ..registry import Unsupported, instruction

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

SPACES = ("global", "shared", "local", "const", "param")


def state_space(syntax: Instruction) -> str | None:
    """The state space in the opcode; None for a generic access. ``.shared`` alone is ``.shared::cta``."""
    if syntax.has(CLUSTER_SHARED):
        return CLUSTER_SHARED
    for modifier in syntax.modifiers:
        name = modifier.partition("::")[0]
        if name in SPACES:
            return name
    return None


def bind_location(syntax: Instruction, operand: Operand, width: int, bind: Binder) -> tuple[str | None, Getter]:
    """Where an access goes: its space (None: generic) and its addresses in it."""
    space = state_space(syntax)
    if space in (None, "shared", CLUSTER_SHARED):
        bind.shared_widths.add(width)
    if space in (None, "global"):
        bind.global_widths.add(width)
    if space is None:
        return None, bind.generic_address(operand)
    get = bind.address(operand)
    if space == "param" and bind.address_space_of(operand) == "param":
        # Parameters of device functions are in the threads' own memory.
        symbol = operand.base.name  # type: ignore[union-attr]
        if bind.symbol_of(symbol).offset >= CALL_PARAMETER_BASE:
            return "local", lambda wave: get(wave) - CALL_PARAMETER_BASE
    return space, get


def locate(
    wave: Wave,
    space: str | None,
    addresses: np.ndarray,
    width: int,
    access: str,
    data: np.ndarray | None = None,
) -> list[tuple[np.ndarray | slice, np.ndarray, np.ndarray]]:
    """(positions among active threads, memory view, item index) for each space the addresses are in."""
    if space is not None and space != "param":
        return [(slice(None), *wave.spaces[space].locate(wave, addresses, width, access, data))]
    parts: list[tuple[np.ndarray | slice, np.ndarray, np.ndarray]] = []
    if space == "param":
        is_call = addresses[0] >= CALL_PARAMETER_BASE
        target = "local" if is_call else "param"
        relative = addresses - CALL_PARAMETER_BASE if is_call else addresses
        return [(slice(None), *wave.spaces[target].locate(wave, relative, width, access, data))]
    for target, positions, local in split_by_space(wave, addresses):
        if isinstance(positions, slice):
            return [(positions, *wave.spaces[target].locate(wave, local, width, access, data))]
        with wave.only(positions):
            part = None if data is None else data[positions]
            parts.append((positions, *wave.spaces[target].locate(wave, local, width, access, part)))
    return parts


def active_values(wave: Wave, values: Any) -> Any:
    """The active threads' part of an array over all threads (or of a scalar)."""
    if values.ndim == 0:
        values = np.full(wave.threads, values)
    return values if wave.lanes is None else values[wave.lanes]


@instruction("ld", "ldu")
def load(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    targets = elements_of(syntax.operands[0])
    width = ptx_type.bytes * len(targets)
    if width not in WIDTH_DTYPES:
        raise Unsupported(f"access of {width} bytes")
    space, get_address = bind_location(syntax, syntax.operands[1], width, bind)
    setters = [bind.active_destination(target, ptx_type) for target in targets]
    split = _splitter(ptx_type, len(targets))

    def execute(wave: Wave) -> None:
        addresses = get_address(wave)
        if wave.mask is not None:
            addresses = addresses[wave.lanes]
        parts = locate(wave, space, addresses, width, "load")
        if len(parts) == 1:
            _, view, index = parts[0]
            raw = view[index]
        else:
            raw = np.empty(addresses.size, WIDTH_DTYPES[width])
            for positions, view, index in parts:
                raw[positions] = view[index]
        for put, values in zip(setters, split(raw), strict=True):
            put(wave, values)

    return ordered(syntax, execute)


def _splitter(ptx_type: PtxType, count: int) -> Callable[[np.ndarray], Any]:
    raw = ptx_type.raw
    if count == 1:
        return lambda data: (data,)
    return lambda data: np.ascontiguousarray(data.view(raw).reshape(-1, count).T)


@instruction("st")
def store(syntax: Instruction, bind: Binder) -> Execute:
    ptx_type = data_type(syntax)
    sources = elements_of(syntax.operands[1])
    count = len(sources)
    width = ptx_type.bytes * count
    if width not in WIDTH_DTYPES:
        raise Unsupported(f"access of {width} bytes")
    space, get_address = bind_location(syntax, syntax.operands[0], width, bind)
    getters = [bind.source(source, ptx_type) for source in sources]
    single = count == 1 and isinstance(sources[0], Register)
    dtype = WIDTH_DTYPES[width]
    raw = ptx_type.raw

    def execute(wave: Wave) -> None:
        addresses = get_address(wave)
        if wave.mask is not None:
            addresses = addresses[wave.lanes]
        if single:
            data = active_values(wave, getters[0](wave)).view(dtype)
        else:
            together = np.empty((addresses.size, count), raw)
            for column, get in enumerate(getters):
                together[:, column] = active_values(wave, get(wave)).view(raw)
            data = together.view(dtype).ravel()
        for positions, view, index in locate(wave, space, addresses, width, "store", data):
            view[index] = data[positions]

    return ordered(syntax, execute)
