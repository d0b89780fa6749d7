"""st.async and red.async: stores to a block of the cluster that an mbarrier there hears of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..binding import Binder, data_type, elements_of
from ..memory.bytes import WIDTH_DTYPES, WIDTH_SHIFT
from ..memory.thread_memory import check_range
from ..ptx.syntax import Instruction
from ..registry import Operation, Unsupported, instruction
from ..sync.bulk_copies import BulkLoad
from .atomics import OPERATIONS, update_of
from .load_store import active_values
from .mbarrier import active_threads, bind_mbarrier

if TYPE_CHECKING:
    from ..wave import Wave


@instruction("st.async", "red.async")
def store_async(syntax: Instruction, bind: Binder) -> Operation:
    """``[address], value, [mbarrier]``, both addresses in the same block of the cluster."""
    if not syntax.has("mbarrier::complete_tx::bytes") or len(syntax.operands) != 3:
        raise Unsupported("this form; there is the one with .mbarrier::complete_tx::bytes")
    ptx_type = data_type(syntax)
    target, value, barrier = syntax.operands
    sources = elements_of(value)
    width = ptx_type.bytes * len(sources)
    get_address, get_barrier = bind.address(target), bind_mbarrier(barrier, bind)
    getters = [bind.source(source, ptx_type) for source in sources]
    bind.shared_widths.add(width)
    combine = None
    if syntax.root == "red":
        update = update_of(next(m for m in syntax.modifiers if m in OPERATIONS), ptx_type)

        def combine(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            return np.asarray(update(old.view(ptx_type.dtype), new.view(ptx_type.dtype))).view(old.dtype)

    def execute(wave: Wave) -> None:
        threads = active_threads(wave)
        addresses = active_values(wave, get_address(wave))
        columns: list[Any] = [active_values(wave, np.asarray(get(wave))).view(ptx_type.raw) for get in getters]
        data = np.ascontiguousarray(np.stack(columns, axis=1)).view(WIDTH_DTYPES[width]).ravel()
        blocks, offsets = wave.clusters.targets(threads, addresses)
        check_range(wave, "shared", offsets, width, "store", wave.shared.size)
        for position, (thread, place) in enumerate(zip(threads, get_barrier(wave), strict=True)):
            block, address = int(blocks[position]), int(addresses[position])
            wave.shared.check_running(wave, int(thread), block, address)
            found = wave.mbarriers.find(int(thread), int(place))
            if found.block != block:
                detail = "a store to one thread block of the cluster, and an mbarrier in another"
                wave.fault_thread("mbarrier", detail, int(thread), int(place))
            flat = offsets[position : position + 1] + block * wave.shared.stride
            if wave.async_hazards is not None and wave.hazards is not None:
                column = wave.hazards.parties.mbarrier(found.index)
                wave.async_hazards.write_elsewhere(flat, width, column, found.phase)
                if wave.remote_accesses is not None and block != wave.block_of_thread[thread]:
                    wave.remote_accesses.copy(int(thread), block, found)
            chunk, new = flat >> WIDTH_SHIFT[width], data[position : position + 1]
            wave.bulk_copies.issue_load(BulkLoad(chunk, new, found, width, int(thread), wave.pc, width, combine))

    return Operation(execute)
