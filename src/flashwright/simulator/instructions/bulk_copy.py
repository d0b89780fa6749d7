"""cp.async.bulk: copies by the tensor memory accelerator, of boxes of tensors and of plain stretches of bytes.

cp.reduce.async.bulk is a copy to global memory that combines with what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from flashwright.hardware.tensor_map import Swizzle

from ..access_patterns import SECTOR_BYTES
from ..architecture import WARP_SIZE
from ..async_hazards import CHUNK_BYTES, AsyncAccess
from ..binding import Binder, Getter, data_type
from ..memory.global_memory import GlobalMemory
from ..memory.windows import GLOBAL_BASE
from ..ptx.syntax import Immediate, Instruction, Operand, Vector
from ..ptx.types import TYPES, ptx_type_of
from ..registry import Operation, Unsupported, instruction
from ..sync.bulk_copies import BulkLoad, BulkStore
from ..tensor_boxes import TensorBox
from .atomics import OPERATIONS, update_of
from .load_store import active_values
from .mbarrier import active_threads, bind_mbarrier

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

_TENSOR_ALIGNMENT = 128  # of a box in shared memory
_LOADED, _STORED = "bytes_global_to_shared", "bytes_shared_to_global"


@instruction("cp.async.bulk.tensor")
def bulk_tensor(syntax: Instruction, bind: Binder) -> Operation:
    operands = _operands(syntax)
    if _is_load(syntax):
        target, source, barrier = operands
        return _tensor_load(target, source, barrier, bind)
    target, source = operands
    return _tensor_store(target, source, bind, TensorBox.write)


@instruction("cp.reduce.async.bulk.tensor")
def reduce_tensor(syntax: Instruction, bind: Binder) -> Operation:
    """``[tensor map, {coordinates}], [shared]``; the type is the tensor map's."""
    name = _reduction_of(syntax)
    target, source = _operands(syntax)

    def combine(box: TensorBox, memory: GlobalMemory, chunks: np.ndarray) -> None:
        box.combine(memory, chunks, update_of(name, ptx_type_of(box.tensor_map.dtype), in_global=True))

    return _tensor_store(target, source, bind, combine, is_reduction=True)


@instruction("cp.async.bulk")
def bulk(syntax: Instruction, bind: Binder) -> Operation:
    operands = _operands(syntax)
    if _is_load(syntax):
        target, source, size, barrier = operands
        return _plain_load(target, source, size, barrier, bind)
    target, source, size = operands
    return _plain_store(target, source, size, bind, np.copyto)


@instruction("cp.reduce.async.bulk")
def reduce_bulk(syntax: Instruction, bind: Binder) -> Operation:
    """``[global], [shared], bytes``."""
    ptx_type = data_type(syntax)
    update = update_of(_reduction_of(syntax), ptx_type, in_global=True)
    target, source, size = _operands(syntax)

    def combine(view: np.ndarray, chunks: np.ndarray) -> None:
        items = view.view(ptx_type.dtype)
        items[...] = update(items, np.ascontiguousarray(chunks).view(ptx_type.dtype))

    return _plain_store(target, source, size, bind, combine, is_reduction=True)


@instruction("cp.async.bulk.prefetch")
def prefetch(syntax: Instruction, bind: Binder) -> Execute:
    """Affects time only."""
    return lambda wave: None


@instruction("cp.async.bulk.commit_group")
def commit_group(syntax: Instruction, bind: Binder) -> Execute:
    return lambda wave: wave.bulk_copies.commit()


@instruction("cp.async.bulk.wait_group")
def wait_group(syntax: Instruction, bind: Binder) -> Execute:
    (newest,) = syntax.operands
    assert isinstance(newest, Immediate)
    allowed = int(newest.value)
    return lambda wave: wave.bulk_copies.wait_group(allowed)


def _operands(syntax: Instruction) -> tuple[Operand, ...]:
    """The operands without a cache policy, which has no effect."""
    for modifier in ("multicast::cluster", "im2col", "im2col_no_offs", "tile::gather4", "tile::scatter4", "cp_mask"):
        if modifier in syntax.modifiers:
            raise Unsupported(f".{modifier}")
    has_policy = any(modifier.endswith("cache_hint") for modifier in syntax.modifiers)
    return syntax.operands[: len(syntax.operands) - has_policy]


def _is_load(syntax: Instruction) -> bool:
    spaces = [modifier.split("::")[0] for modifier in syntax.modifiers]
    places = [name for name in spaces if name in ("shared", "global")]
    if places not in (["shared", "global"], ["global", "shared"]):
        raise Unsupported(f"a bulk copy between {' and '.join(places) or 'unknown spaces'}")
    return places[0] == "shared"


def _reduction_of(syntax: Instruction) -> str:
    """The operation of a reducing copy."""
    if _is_load(syntax):
        raise Unsupported("a reducing bulk copy to shared memory")
    return next(modifier for modifier in syntax.modifiers if modifier in OPERATIONS)


# Operands of each active thread: a copy is usually issued by one thread of a block -------------------------------


def _per_thread(wave: Wave, *getters: Getter) -> Iterator[tuple[int, ...]]:
    """(thread, value, …) of each active thread."""
    columns = [active_values(wave, np.asarray(get(wave))) for get in getters]
    for thread, *values in zip(active_threads(wave), *columns, strict=True):
        yield int(thread), *(int(value) for value in values)


def _bind_box(operand: Operand, bind: Binder) -> Callable[[Wave], list[TensorBox]]:
    """``[tensor map, {coordinates}]`` of each active thread."""
    assert isinstance(operand, Vector)
    address, coordinates = operand.elements
    assert isinstance(coordinates, Vector)
    get_map = bind.generic_address(address)
    getters = [bind.source(item, TYPES["s32"]) for item in coordinates.elements]

    def boxes(wave: Wave) -> list[TensorBox]:
        found = []
        for thread, place, *start in _per_thread(wave, get_map, *getters):
            tensor_map = wave.tensor_maps.at(wave, thread, place)
            if tensor_map.rank != len(start):
                detail = f"{len(start)} coordinates for a tensor map of {tensor_map.rank} dimensions"
                wave.fault_thread("tensor-map", detail, thread, place)
            found.append(TensorBox(tensor_map, tuple(start)))
        return found

    return boxes


def _tensor_load(target: Operand, source: Operand, barrier: Operand, bind: Binder) -> Operation:
    get_target, get_boxes, get_barrier = bind.address(target), _bind_box(source, bind), bind_mbarrier(barrier, bind)
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        boxes, barriers = get_boxes(wave), get_barrier(wave)
        for (thread, address), box, place in zip(_per_thread(wave, get_target), boxes, barriers, strict=True):
            _check_box(wave, thread, address, box)
            _check_written(wave, thread, box.unwritten(wave.global_memory))
            _issue_load(wave, thread, box.chunk_addresses(address), box.read(wave.global_memory), int(place))
            wave.counters.count_bulk(wave, _LOADED, *box.sectors())

    return Operation(execute)


def _tensor_store(
    target: Operand,
    source: Operand,
    bind: Binder,
    write: Callable[[TensorBox, GlobalMemory, np.ndarray], None],
    is_reduction: bool = False,
) -> Operation:
    get_source, get_boxes = bind.address(source), _bind_box(target, bind)
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        for (thread, address), box in zip(_per_thread(wave, get_source), get_boxes(wave), strict=True):
            _check_box(wave, thread, address, box)
            if min(box.coordinates) < 0:
                detail = f"a box is stored at {box.coordinates}; only loads may begin before the tensor"
                wave.fault_thread("tensor-map", detail, thread)
            if is_reduction:
                _check_written(wave, thread, box.unwritten(wave.global_memory))
            _issue_store(wave, thread, box.chunk_addresses(address), partial(write, box, wave.global_memory))
            wave.counters.count_bulk(wave, _STORED, *box.sectors())

    return Operation(execute)


def _plain_load(target: Operand, source: Operand, size: Operand, barrier: Operand, bind: Binder) -> Operation:
    getters = bind.address(target), bind.address(source), bind.source(size, TYPES["u32"])
    get_barrier = bind_mbarrier(barrier, bind)
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        for (thread, start, place, count), mbarrier in zip(_per_thread(wave, *getters), get_barrier(wave), strict=True):
            data = _global_chunks(wave, thread, start, place, count)
            has_unwritten = wave.global_memory.unwritten_among(np.array([place]), count).size
            _check_written(wave, thread, place if has_unwritten else None)
            _issue_load(wave, thread, start + np.arange(0, count, CHUNK_BYTES), data.copy(), int(mbarrier))
            wave.counters.count_bulk(wave, _LOADED, *_sectors(place, count))

    return Operation(execute)


def _plain_store(
    target: Operand,
    source: Operand,
    size: Operand,
    bind: Binder,
    write: Callable[[np.ndarray, np.ndarray], None],
    is_reduction: bool = False,
) -> Operation:
    getters = bind.address(source), bind.address(target), bind.source(size, TYPES["u32"])
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        for thread, start, place, count in _per_thread(wave, *getters):
            view = _global_chunks(wave, thread, start, place, count)
            if is_reduction:
                has_unwritten = wave.global_memory.unwritten_among(np.array([place]), count).size
                _check_written(wave, thread, place if has_unwritten else None)
            else:
                wave.global_memory.mark_written(np.array([place]), count)
            _issue_store(wave, thread, start + np.arange(0, count, CHUNK_BYTES), partial(write, view))
            wave.counters.count_bulk(wave, _STORED, *_sectors(place, count))

    return Operation(execute)


# Checks ----------------------------------------------------------------------------------------------------------


def _check_box(wave: Wave, thread: int, address: int, box: TensorBox) -> None:
    if address % _TENSOR_ALIGNMENT:
        detail = f"a box in shared memory must begin at a multiple of {_TENSOR_ALIGNMENT} bytes"
        wave.fault_thread("misaligned", detail, thread, address)
    swizzle, row_bytes = box.tensor_map.swizzle, box.tensor_map.row_bytes
    if swizzle is not Swizzle.NONE and row_bytes < swizzle.value:
        detail = (
            f"rows of {row_bytes} bytes are narrower than the swizzle's {swizzle.value}: where they lie is not modelled"
        )
        wave.fault_thread("unsupported", detail, thread, address)
    _check_shared(wave, thread, address, box.tensor_map.box_bytes)
    outside = box.outside(wave.global_memory)
    if outside is not None:
        wave.fault_thread("out-of-bounds", "the tensor map describes memory that is not allocated", thread, outside)


def _check_written(wave: Wave, thread: int, address: int | None) -> None:
    if address is not None:
        wave.hazard("uninitialised-global", "bulk copy of global memory that nobody wrote", thread, address)


def _check_shared(wave: Wave, thread: int, address: int, size: int) -> None:
    if address < 0 or address + size > wave.shared.size:
        detail = f"bulk copy of {size} bytes at offset {address} of {wave.shared.size} bytes of shared memory"
        wave.fault_thread("out-of-bounds", detail, thread, address)


def _global_chunks(wave: Wave, thread: int, shared: int, address: int, size: int) -> np.ndarray:
    """The global memory of a plain copy, as chunks."""
    for value, what in ((shared, "shared address"), (address, "global address"), (size, "size")):
        if value % CHUNK_BYTES:
            detail = f"{what} {value:#x} of a bulk copy is not a multiple of {CHUNK_BYTES}"
            wave.fault_thread("misaligned", detail, thread, value)
    _check_shared(wave, thread, shared, size)
    allocation = wave.global_memory.allocation_at(address)
    if allocation is None or allocation.freed or address + size > allocation.end:
        wave.fault_thread("out-of-bounds", f"bulk copy of {size} bytes of global memory", thread, address)
    first = (address - GLOBAL_BASE) // CHUNK_BYTES
    return wave.global_memory.views[CHUNK_BYTES][first : first + size // CHUNK_BYTES]


def _sectors(address: int, size: int) -> tuple[int, int, int]:
    touched = (address + size - 1) // SECTOR_BYTES - address // SECTOR_BYTES + 1 if size else 0
    return size, touched, -(-size // SECTOR_BYTES)


# Issue -----------------------------------------------------------------------------------------------------------


def _issue_load(wave: Wave, thread: int, chunks: np.ndarray, data: np.ndarray, barrier_address: int) -> None:
    barrier = wave.mbarriers.find(thread, barrier_address, asynchronous=True)
    overlapped = wave.mbarriers.within(barrier.block, int(chunks.min()), int(chunks.max()) + CHUNK_BYTES)
    if overlapped is not None:
        detail = f"bulk copy over the mbarrier at {overlapped.address:#x}"
        wave.fault_thread("mbarrier", detail, thread, overlapped.address)
    flat = chunks + int(wave.shared.thread_base[thread])
    if wave.async_hazards is not None and wave.hazards is not None:
        column = wave.hazards.parties.mbarrier(barrier.index)
        wave.async_hazards.write(_access(wave, "bulk copy", thread, flat), column, barrier.phase)
    wave.bulk_copies.issue_load(BulkLoad(flat >> 4, data, barrier, chunks.size * CHUNK_BYTES, thread, wave.pc))


def _issue_store(wave: Wave, thread: int, chunks: np.ndarray, write: Callable[[np.ndarray], None]) -> None:
    flat = chunks + int(wave.shared.thread_base[thread])
    if wave.async_hazards is not None and wave.hazards is not None:
        column = wave.hazards.parties.bulk_store(int(wave.warp_in_block[thread]))
        group = wave.bulk_copies.store_stamp(thread)
        access = _access(wave, "bulk store", thread, flat)
        wave.async_hazards.read(access, np.full(flat.size, column), np.full(flat.size, group))
    shared = wave.shared.store.views[CHUNK_BYTES]
    wave.bulk_copies.issue_store(BulkStore(lambda: write(shared[flat >> 4]), thread, wave.pc))


def _access(wave: Wave, what: str, thread: int, flat: np.ndarray) -> AsyncAccess:
    assert wave.hazards is not None
    clocks = wave.hazards.clocks.seen[thread // WARP_SIZE][None]
    return AsyncAccess(what, flat, clocks, np.zeros(flat.size, np.int64), np.full(flat.size, thread))
