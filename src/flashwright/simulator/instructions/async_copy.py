"""cp.async: non-bulk asynchronous copies from global to shared memory, and their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..binding import Binder, Getter
from ..hazards import SharedAccess
from ..memory.bytes import WIDTH_DTYPES
from ..memory.thread_memory import check_range
from ..memory.windows import GLOBAL_BASE
from ..ptx.syntax import Immediate, Instruction, Operand, Register
from ..ptx.types import TYPES
from ..registry import Unsupported, instruction
from .load_store import active_values
from .mbarrier import active_threads, bind_mbarrier, names_own_block

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]


@instruction("cp.async")
def cp_async(syntax: Instruction, bind: Binder) -> Execute:
    if syntax.modifiers[1] not in ("ca", "cg"):
        raise Unsupported("this form of cp")
    has_policy = any(m.endswith("cache_hint") for m in syntax.modifiers)
    operands = syntax.operands[: len(syntax.operands) - has_policy]
    size = operands[2]
    assert isinstance(size, Immediate)
    width = int(size.value)
    if width not in ((16,) if syntax.modifiers[1] == "cg" else (4, 8, 16)):
        raise Unsupported(f"copy of {width} bytes")
    get_target, get_source = bind.address(operands[0]), bind.address(operands[1])
    bind.shared_widths.add(width)
    bind.global_widths.add(width)
    get_count = _source_bytes(operands[3], width, bind) if len(operands) > 3 else None

    def execute(wave: Wave) -> None:
        targets, sources = (active_values(wave, get(wave)) for get in (get_target, get_source))
        if get_count is None:
            data = _read(wave, sources, width)
        else:
            data = _read_partly(wave, sources, width, active_values(wave, np.asarray(get_count(wave))))
        shared = wave.shared
        targets = shared.own_offsets(wave, targets, "async-copy")
        check_range(wave, "shared", targets, width, "async-copy", shared.size)
        wave.counters.count_shared(wave, targets, width)
        flat = targets + shared.bases(wave)
        if wave.hazards is not None:
            wave.hazards.check(SharedAccess("async-copy", width, targets, flat, data))
        wave.async_copies.issue(flat, data, width)

    return execute


def _source_bytes(operand: Operand, width: int, bind: Binder) -> Getter:
    """The fourth operand: how many bytes to read (zeros follow), or a predicate to ignore the source."""
    if isinstance(operand, Register) and bind.slot_of(operand.name).type.kind == "pred":
        ignore = bind.predicate(operand)
        return lambda wave: np.where(ignore(wave), np.uint32(0), np.uint32(width))
    return bind.source(operand, TYPES["u32"])


def _read(wave: Wave, sources: np.ndarray, width: int) -> np.ndarray:
    view, index = wave.global_memory.locate(wave, sources, width, "async-copy")
    return view[index]


def _read_partly(wave: Wave, sources: np.ndarray, width: int, counts: np.ndarray) -> np.ndarray:
    data = np.zeros(sources.size, WIDTH_DTYPES[width])
    whole = np.flatnonzero(counts >= width)
    if whole.size == sources.size:
        return _read(wave, sources, width)
    if whole.size:
        with wave.only(whole):
            data[whole] = _read(wave, sources[whole], width)
    part = np.flatnonzero((counts > 0) & (counts < width))
    if part.size:
        memory = wave.global_memory
        with wave.only(part):
            misaligned = (sources[part] & (width - 1)) != 0
            if misaligned.any():
                position = int(np.flatnonzero(misaligned)[0])
                wave.fault("misaligned", f"source of a {width}-byte copy", position, int(sources[part][position]))
            memory.check(wave, sources[part], 1, "async-copy")
            memory.check(wave, sources[part] + counts[part] - 1, 1, "async-copy")
        bytes_of = data.view(np.uint8).reshape(-1, width)
        for thread in part:
            start, count = int(sources[thread]) - GLOBAL_BASE, int(counts[thread])
            bytes_of[thread, :count] = memory.bytes[start : start + count]
            with wave.only(np.array([thread])):
                memory.check_written(wave, sources[thread : thread + 1], count, "async-copy")
    return data


@instruction("cp.async.commit_group")
def commit_group(syntax: Instruction, bind: Binder) -> Execute:
    return lambda wave: wave.async_copies.commit()


@instruction("cp.async.wait_group")
def wait_group(syntax: Instruction, bind: Binder) -> Execute:
    (newest,) = syntax.operands
    assert isinstance(newest, Immediate)
    allowed = int(newest.value)
    return lambda wave: wave.async_copies.wait_group(allowed)


@instruction("cp.async.wait_all")
def wait_all(syntax: Instruction, bind: Binder) -> Execute:
    return lambda wave: wave.async_copies.wait_all()


@instruction("cp.async.mbarrier.arrive")
def mbarrier_arrive(syntax: Instruction, bind: Binder) -> Execute:
    """The thread arrives when its copies so far have come. Without .noinc, the arrival is not one of those expected."""
    is_counted = not syntax.has("noinc")
    get_addresses = bind_mbarrier(syntax.operands[0], bind, names_own_block(syntax))

    def execute(wave: Wave) -> None:
        threads, addresses = active_threads(wave), get_addresses(wave)
        barriers = [
            wave.mbarriers.expect_arrival(int(thread), int(address), is_counted)
            for thread, address in zip(threads, addresses, strict=True)
        ]
        wave.async_copies.arrive_later(threads, barriers)

    return execute
