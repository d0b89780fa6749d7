"""One executed `ldmatrix` of an operand: which rows its lanes requested, and in which banks they lie."""

from __future__ import annotations

from flashwright.hardware.units import ELEMENT_BYTES, VECTOR_BYTES
from flashwright.kernels.explanation import ExecutedLoads, SharedMap
from flashwright.kernels.family import KernelConfig
from flashwright.simulator.access_patterns import WAVEFRONT_BYTES, shared_cost
from flashwright.workbench.explain.execution import Execution, by_lane
from flashwright.workbench.explain.facts import LaneAccess, MatrixLoad
from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_ptx

ROWS_SHOWN = 16
"""An `ldmatrix.x4` spans 16 rows at most."""
_ELEMENTS = VECTOR_BYTES // ELEMENT_BYTES


def matrix_load_facts(
    config: KernelConfig, loads: ExecutedLoads, execution: Execution, shared: SharedMap
) -> MatrixLoad:
    """The first `ldmatrix` of the operand in the trace."""
    entry, access, region = next(
        (entry, entry.accesses[0], region)
        for entry in execution.trace
        if kind_of_ptx(entry.opcode) is Kind.LOAD
        and (region := shared.region_at(min(entry.accesses[0].address_of_lane.values()))) is not None
        and region.operand == loads.operand
    )
    place = {
        loads.offset(row, vector * _ELEMENTS): (row, vector)
        for row in range(loads.rows)
        for vector in range(loads.columns // _ELEMENTS)
    }
    cost = shared_cost(by_lane(access), access.width)
    return MatrixLoad(
        config=config.short_form(),
        swizzled=loads.is_swizzled,
        operand=loads.operand,
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
                (region.offset + loads.offset(row, vector * _ELEMENTS)) % WAVEFRONT_BYTES // VECTOR_BYTES
                for vector in range(loads.panel_columns // _ELEMENTS)
            )
            for row in range(min(ROWS_SHOWN, loads.rows))
        ),
    )
