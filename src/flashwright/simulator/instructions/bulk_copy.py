"""cp.async.bulk: copies by the tensor memory accelerator, of boxes of tensors and of plain stretches of bytes.

cp.reduce.async.bulk is a copy to global memory that combines with what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
from ..memory_order import Ordering
from ..ptx.syntax import Immediate, Instruction, Operand, Vector
from ..ptx.types import TYPES, ptx_type_of
from ..registry import Operation, Unsupported, instruction
from ..sync.bulk_copies import BulkLoad, BulkStore
from ..sync.mbarriers import Mbarrier
from ..tensor_boxes import TensorBox
from .atomics import OPERATIONS, update_of
from .load_store import active_values
from .mbarrier import active_threads, bind_mbarrier

if TYPE_CHECKING:
    from ..wave import Wave

Execute = Callable[..., Any]

_TENSOR_ALIGNMENT = 128  # of a box in shared memory
_LOADED, _STORED = "bytes_global_to_shared", "bytes_shared_to_global"
# Directions of a copy, by the spaces in its opcode.
TO_SHARED, TO_GLOBAL, IN_CLUSTER = "to shared", "to global", "in the cluster"
_DIRECTIONS = {("shared", "global"): TO_SHARED, ("global", "shared"): TO_GLOBAL, ("shared", "shared"): IN_CLUSTER}


@instruction("cp.async.bulk.tensor")
def bulk_tensor(syntax: Instruction, bind: Binder) -> Operation:
    operands = _operands(syntax)
    if _direction(syntax) == TO_SHARED:
        target, source, barrier, *ranks = operands
        return _tensor_load(target, source, barrier, ranks, bind)
    target, source = operands
    return _tensor_store(target, source, bind, TensorBox.write)


@instruction("cp.reduce.async.bulk.tensor")
def reduce_tensor(syntax: Instruction, bind: Binder) -> Operation:
    """``[tensor map, {coordinates}], [shared]``; the type is the tensor map's."""
    name = _reduction_of(syntax)
    target, source = _operands(syntax)

    def combine(box: TensorBox, memory: GlobalMemory, chunks: np.ndarray) -> None:
        box.combine(memory, chunks, update_of(name, ptx_type_of(box.tensor_map.dtype)))

    return _tensor_store(target, source, bind, combine, _relaxed(name))


@instruction("cp.async.bulk")
def bulk(syntax: Instruction, bind: Binder) -> Operation:
    operands = _operands(syntax)
    direction = _direction(syntax)
    if direction != TO_GLOBAL:
        target, source, size, barrier, *ranks = operands
        if direction == IN_CLUSTER:
            return _cluster_copy(target, source, size, barrier, bind)
        return _plain_load(target, source, size, barrier, ranks, bind)
    target, source, size = operands
    return _plain_store(target, source, size, bind, np.copyto)


@instruction("cp.reduce.async.bulk")
def reduce_bulk(syntax: Instruction, bind: Binder) -> Operation:
    """``[global], [shared], bytes``, or to another block ``[shared::cluster], [shared], bytes, [mbarrier]``."""
    ptx_type, name = data_type(syntax), _reduction_of(syntax)
    update = update_of(name, ptx_type)
    if _direction(syntax) != TO_GLOBAL:

        def combined(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            parts = (np.ascontiguousarray(part).view(ptx_type.dtype) for part in (old, new))
            return np.asarray(update(*parts)).view(old.dtype)

        target, source, size, barrier = _operands(syntax)
        return _cluster_copy(target, source, size, barrier, bind, combined)
    target, source, size = _operands(syntax)

    def combine(view: np.ndarray, chunks: np.ndarray) -> None:
        items = view.view(ptx_type.dtype)
        items[...] = update(items, np.ascontiguousarray(chunks).view(ptx_type.dtype))

    return _plain_store(target, source, size, bind, combine, _relaxed(name, ptx_type.is_float))


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
    allowed, until_read = int(newest.value), syntax.has("read")
    return lambda wave: wave.bulk_copies.wait_group(allowed, until_read)


def _operands(syntax: Instruction) -> tuple[Operand, ...]:
    """The operands without a cache policy, which has no effect."""
    for modifier in ("im2col", "im2col_no_offs", "tile::gather4", "tile::scatter4", "cp_mask", "cta_group::2"):
        if modifier in syntax.modifiers:
            raise Unsupported(f".{modifier}")
    has_policy = any(modifier.endswith("cache_hint") for modifier in syntax.modifiers)
    return syntax.operands[: len(syntax.operands) - has_policy]


def _direction(syntax: Instruction) -> str:
    spaces = [modifier.split("::")[0] for modifier in syntax.modifiers]
    places = tuple(name for name in spaces if name in ("shared", "global"))
    if places not in _DIRECTIONS:
        raise Unsupported(f"a bulk copy between {' and '.join(places) or 'unknown spaces'}")
    return _DIRECTIONS[places]


def _reduction_of(syntax: Instruction) -> str:
    """The operation of a reducing copy."""
    return next(modifier for modifier in syntax.modifiers if modifier in OPERATIONS)


def _relaxed(reduction: str, is_float: bool = True) -> Ordering:
    """Reductions by the copy engine are relaxed, of gpu scope, and tell nobody what was there."""
    return Ordering(is_flag=False, observes=False, is_sum=is_float and reduction == "add")


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


@dataclass(frozen=True)
class _Target:
    """Where a copy to shared memory goes: a block of the wave, an offset there, and an mbarrier of the block."""

    block: int
    offset: int
    barrier: Mbarrier


def _bind_targets(
    target: Operand, barrier: Operand, ranks: Sequence[Operand], bind: Binder
) -> Callable[[Wave], list[tuple[int, list[_Target]]]]:
    """(thread, its targets) of each active thread: one, or with .multicast the same place in several blocks."""
    get_target, get_barrier = bind.address(target), bind_mbarrier(barrier, bind)
    get_ranks = bind.source(ranks[0], TYPES["u16"]) if ranks else None

    def targets(wave: Wave) -> list[tuple[int, list[_Target]]]:
        getters = [get_target] if get_ranks is None else [get_target, get_ranks]
        found = []
        for (thread, address, *masks), place in zip(_per_thread(wave, *getters), get_barrier(wave), strict=True):
            pairs = [(address, int(place))]
            if masks:
                chosen = [rank for rank in range(16) if masks[0] >> rank & 1]
                in_rank = wave.clusters.in_rank
                pairs = [(in_rank(rank, address), in_rank(rank, int(place))) for rank in chosen]
            found.append((thread, [_target(wave, thread, *pair) for pair in pairs]))
        return found

    return targets


def _target(wave: Wave, thread: int, address: int, barrier_address: int) -> _Target:
    block, offset = wave.clusters.target(thread, address)
    wave.shared.check_running(wave, thread, block, address)
    barrier = wave.mbarriers.find(thread, barrier_address, asynchronous=True)
    if barrier.block != block:
        detail = "a copy to one thread block of the cluster, and an mbarrier in another"
        wave.fault_thread("mbarrier", detail, thread, barrier_address)
    return _Target(block, offset, barrier)


def _tensor_load(
    target: Operand, source: Operand, barrier: Operand, ranks: Sequence[Operand], bind: Binder
) -> Operation:
    get_boxes, get_targets = _bind_box(source, bind), _bind_targets(target, barrier, ranks, bind)
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        for (thread, targets), box in zip(get_targets(wave), get_boxes(wave), strict=True):
            for place in targets:
                _check_box(wave, thread, place.offset, box)
            _check_written(wave, thread, box.unwritten(wave.global_memory))
            for place in targets:
                _issue_load(wave, thread, place, box.chunk_addresses(place.offset), box.read(wave.global_memory))
            wave.counters.count_bulk(wave, _LOADED, *box.sectors())

    return Operation(execute)


def _tensor_store(
    target: Operand,
    source: Operand,
    bind: Binder,
    write: Callable[[TensorBox, GlobalMemory, np.ndarray], None],
    ordering: Ordering | None = None,
) -> Operation:
    """``ordering``: of a reduction."""
    get_source, get_boxes = bind.address(source), _bind_box(target, bind)
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        for (thread, address), box in zip(_per_thread(wave, get_source), get_boxes(wave), strict=True):
            address = wave.shared.own_offset(wave, thread, address, "bulk copy")
            _check_box(wave, thread, address, box)
            if min(box.coordinates) < 0:
                detail = f"a box is stored at {box.coordinates}; only loads may begin before the tensor"
                wave.fault_thread("tensor-map", detail, thread)
            if ordering is not None:
                _check_written(wave, thread, box.unwritten(wave.global_memory))
            write_box = partial(write, box, wave.global_memory)
            _issue_store(wave, thread, box.chunk_addresses(address), write_box, box.stretches(), ordering)
            wave.counters.count_bulk(wave, _STORED, *box.sectors())

    return Operation(execute)


def _plain_load(
    target: Operand, source: Operand, size: Operand, barrier: Operand, ranks: Sequence[Operand], bind: Binder
) -> Operation:
    getters = bind.address(source), bind.source(size, TYPES["u32"])
    get_targets = _bind_targets(target, barrier, ranks, bind)
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        for (thread, place, count), (_, targets) in zip(_per_thread(wave, *getters), get_targets(wave), strict=True):
            for at in targets:
                data = _global_chunks(wave, thread, at.offset, place, count)
                has_unwritten = wave.global_memory.unwritten_among(np.array([place]), count).size
                _check_written(wave, thread, place if has_unwritten else None)
                _issue_load(wave, thread, at, at.offset + np.arange(0, count, CHUNK_BYTES), data.copy())
            wave.counters.count_bulk(wave, _LOADED, *_sectors(place, count))

    return Operation(execute)


def _cluster_copy(
    target: Operand,
    source: Operand,
    size: Operand,
    barrier: Operand,
    bind: Binder,
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> Operation:
    """From the thread's own shared memory to that of a block of the cluster."""
    getters = bind.address(source), bind.source(size, TYPES["u32"])
    get_targets = _bind_targets(target, barrier, (), bind)
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        for (thread, start, count), (_, (place,)) in zip(_per_thread(wave, *getters), get_targets(wave), strict=True):
            start = wave.shared.own_offset(wave, thread, start, "bulk copy")
            _check_alignment(wave, thread, (start, "source"), (place.offset, "target"), (count, "size"))
            for offset in (start, place.offset):
                _check_shared(wave, thread, offset, count)
            steps = np.arange(0, count, CHUNK_BYTES)
            flat = start + steps + int(wave.shared.thread_base[thread])
            if wave.async_hazards is not None:
                wave.async_hazards.check_read(_access(wave, "bulk copy", thread, flat))
            data = wave.shared.store.views[CHUNK_BYTES][flat >> 4].copy()
            own = int(wave.block_of_thread[thread])
            if wave.remote_accesses is not None and place.block != own:
                wave.remote_accesses.copy(thread, own, place.barrier)
            _issue_load(wave, thread, place, place.offset + steps, data, combine)

    return Operation(execute)


def _plain_store(
    target: Operand,
    source: Operand,
    size: Operand,
    bind: Binder,
    write: Callable[[np.ndarray, np.ndarray], None],
    ordering: Ordering | None = None,
) -> Operation:
    """``ordering``: of a reduction."""
    getters = bind.address(source), bind.address(target), bind.source(size, TYPES["u32"])
    bind.shared_widths.add(CHUNK_BYTES)

    def execute(wave: Wave) -> None:
        for thread, start, place, count in _per_thread(wave, *getters):
            start = wave.shared.own_offset(wave, thread, start, "bulk copy")
            view = _global_chunks(wave, thread, start, place, count)
            if ordering is not None:
                has_unwritten = wave.global_memory.unwritten_among(np.array([place]), count).size
                _check_written(wave, thread, place if has_unwritten else None)
            else:
                wave.global_memory.mark_written(np.array([place]), count)
            chunks, stretch = start + np.arange(0, count, CHUNK_BYTES), (np.array([place]), count)
            _issue_store(wave, thread, chunks, partial(write, view), stretch, ordering)
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


def _check_alignment(wave: Wave, thread: int, *values: tuple[int, str]) -> None:
    for value, what in values:
        if value % CHUNK_BYTES:
            detail = f"{what} {value:#x} of a bulk copy is not a multiple of {CHUNK_BYTES}"
            wave.fault_thread("misaligned", detail, thread, value)


def _global_chunks(wave: Wave, thread: int, shared: int, address: int, size: int) -> np.ndarray:
    """The global memory of a plain copy, as chunks."""
    _check_alignment(wave, thread, (shared, "shared address"), (address, "global address"), (size, "size"))
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


def _issue_load(
    wave: Wave,
    thread: int,
    target: _Target,
    chunks: np.ndarray,
    data: np.ndarray,
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> None:
    """``chunks`` are offsets in the target block's shared memory."""
    barrier = target.barrier
    overlapped = wave.mbarriers.within(barrier.block, int(chunks.min()), int(chunks.max()) + CHUNK_BYTES)
    if overlapped is not None:
        detail = f"bulk copy over the mbarrier at {overlapped.address:#x}"
        wave.fault_thread("mbarrier", detail, thread, overlapped.address)
    flat = chunks + target.block * wave.shared.stride
    if wave.async_hazards is not None and wave.hazards is not None:
        column = wave.hazards.parties.mbarrier(barrier.index)
        if target.block == wave.block_of_thread[thread]:
            wave.async_hazards.write(_access(wave, "bulk copy", thread, flat), column, barrier.phase)
        else:
            wave.async_hazards.write_elsewhere(flat, CHUNK_BYTES, column, barrier.phase)
            if wave.remote_accesses is not None:
                wave.remote_accesses.copy(thread, target.block, barrier)
    size = chunks.size * CHUNK_BYTES
    wave.bulk_copies.issue_load(BulkLoad(flat >> 4, data, barrier, size, thread, wave.pc, combine=combine))


def _issue_store(
    wave: Wave,
    thread: int,
    chunks: np.ndarray,
    write: Callable[[np.ndarray], None],
    stretches: tuple[np.ndarray, int],
    ordering: Ordering | None,
) -> None:
    """``stretches``: addresses in global memory, and the bytes at each."""
    flat = chunks + int(wave.shared.thread_base[thread])
    if wave.async_hazards is not None and wave.hazards is not None:
        column = wave.hazards.parties.bulk_store(int(wave.warp_in_block[thread]))
        group = wave.bulk_copies.store_stamp(thread)
        access = _access(wave, "bulk store", thread, flat)
        wave.async_hazards.read(access, np.full(flat.size, column), np.full(flat.size, group))
    record = None
    if wave.global_hazards is not None:
        record = wave.global_hazards.bulk_write(thread, *stretches, ordering)
    shared = wave.shared.store.views[CHUNK_BYTES]
    wave.bulk_copies.issue_store(BulkStore(lambda: shared[flat >> 4], write, thread, wave.pc, record))


def _access(wave: Wave, what: str, thread: int, flat: np.ndarray) -> AsyncAccess:
    assert wave.hazards is not None
    clocks = wave.hazards.clocks.seen[thread // WARP_SIZE][None]
    return AsyncAccess(what, flat, clocks, np.zeros(flat.size, np.int64), np.full(flat.size, thread))
