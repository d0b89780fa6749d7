"""One executed `ldmatrix` of K: which rows its lanes asked for, and in which banks they lie."""

from __future__ import annotations

from flashwright.explain.execution import Execution, by_lane
from flashwright.explain.facts import LaneAccess, MatrixLoad, SharedMap
from flashwright.explain.instruction_kinds import Kind, kind_of_ptx
from flashwright.kernel_configs import FlashForwardKernelConfig
from flashwright.simulator.access_patterns import WAVEFRONT_BYTES, shared_cost
from flashwright.tile_shapes import VECTOR_BYTES, ForwardKernelTileShapes

OPERAND = "K"
ROWS_SHOWN = 16
"""An `ldmatrix.x4` spans 16 rows at most."""
_ELEMENTS = VECTOR_BYTES // 2


def matrix_load_facts(config: FlashForwardKernelConfig, execution: Execution, shared: SharedMap) -> MatrixLoad:
    """The first `ldmatrix` of K in the trace."""
    entry, access, region = next(
        (entry, entry.accesses[0], region)
        for entry in execution.trace
        if kind_of_ptx(entry.opcode) is Kind.LOAD
        and (region := shared.region_at(min(entry.accesses[0].address_of_lane.values()))) is not None
        and region.operand == OPERAND
    )
    layout, rows = ForwardKernelTileShapes(config).shared_layout, config.B_c
    vectors = config.d_head // _ELEMENTS
    place = {
        layout.offset(row, vector * _ELEMENTS, rows): (row, vector) for row in range(rows) for vector in range(vectors)
    }
    cost = shared_cost(by_lane(access), access.width)
    return MatrixLoad(
        config=config.short_form(),
        swizzled=config.swizzled,
        operand=OPERAND,
        instruction=entry.text,
        source=str(entry.source.outermost) if entry.source else "",
        lanes=tuple(
            LaneAccess(lane, address, *place[address - region.offset])
            for lane, address in sorted(access.address_of_lane.items())
        ),
        wavefronts=cost.wavefronts,
        wavefronts_ideal=cost.ideal,
        bank_groups=tuple(
            tuple(
                (region.offset + layout.offset(row, vector * _ELEMENTS, rows)) % WAVEFRONT_BYTES // VECTOR_BYTES
                for vector in range(layout.panel_columns // _ELEMENTS)
            )
            for row in range(min(ROWS_SHOWN, rows))
        ),
    )
