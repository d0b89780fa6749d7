"""What one `wgmma` reads of K in shared memory: core matrices of 8 rows by 16 bytes, found by its descriptor."""

from __future__ import annotations

from flashwright.explain.facts import LaneAccess, MatrixLoad
from flashwright.hopper.config import HopperForwardKernelConfig
from flashwright.hopper.shapes import PANEL_ROW_BYTES, HopperTileShapes
from flashwright.simulator.access_patterns import WAVEFRONT_BYTES
from flashwright.simulator.matrix_descriptor import CHUNK_BYTES, DEPTH, MatrixDescriptor
from flashwright.tensor_map import Swizzle

OPERAND = "K"
K_STEP = 1
"""The product's second instruction: its columns do not begin at the row's first byte."""
ROWS_SHOWN = 16
_MATRIX_ROWS = 8
_CHUNKS_PER_ROW = PANEL_ROW_BYTES // CHUNK_BYTES


def core_matrix_facts(config: HopperForwardKernelConfig) -> tuple[MatrixLoad, ...]:
    """The first four core matrices that an instruction reads, as they lie and as they would lie without swizzle."""
    return tuple(_core_matrices(config, swizzle) for swizzle in (Swizzle.B128, Swizzle.NONE))


def _core_matrices(config: HopperForwardKernelConfig, swizzle: Swizzle) -> MatrixLoad:
    start = HopperTileShapes(config).K_offset
    rows = min(ROWS_SHOWN, config.B_c)
    chunk_of_address = {
        int(swizzle.apply(start + CHUNK_BYTES * chunk)): divmod(chunk, _CHUNKS_PER_ROW)
        for chunk in range(rows * _CHUNKS_PER_ROW)
    }
    address_of_chunk = {chunk: address for address, chunk in chunk_of_address.items()}
    # Eight rows of the first 16 bytes, then of the next; then both of the rows below.
    matrices = [(group, chunk) for group in range(rows // _MATRIX_ROWS) for chunk in range(2)]
    lanes = []
    for matrix, (group, chunk) in enumerate(matrices):
        for row in range(group * _MATRIX_ROWS, (group + 1) * _MATRIX_ROWS):
            address = (
                int(_descriptor(start).chunk_addresses(config.B_c, is_mn_major=False)[row, chunk])
                if swizzle is Swizzle.B128
                else address_of_chunk[row, K_STEP * 2 + chunk]
            )
            number = matrix * _MATRIX_ROWS + row % _MATRIX_ROWS
            lanes.append(LaneAccess(number, address, *chunk_of_address[address]))
    groups = [[lane.bank_group for lane in lanes if lane.lane // _MATRIX_ROWS == m] for m in range(len(matrices))]
    return MatrixLoad(
        config=config.short_form(),
        swizzled=swizzle is Swizzle.B128,
        operand=OPERAND,
        instruction=f"wgmma.mma_async.sync.aligned.m64n{config.B_c}k{DEPTH}",
        source=f"k-step {K_STEP} of S = QKᵀ: columns {K_STEP * DEPTH} to {(K_STEP + 1) * DEPTH - 1}",
        lanes=tuple(lanes),
        wavefronts=sum(max(of_matrix.count(group) for group in of_matrix) for of_matrix in groups),
        wavefronts_ideal=len(matrices),
        bank_groups=tuple(
            tuple(address_of_chunk[row, chunk] % WAVEFRONT_BYTES // CHUNK_BYTES for chunk in range(_CHUNKS_PER_ROW))
            for row in range(rows)
        ),
        readers="rows",
    )


def _descriptor(start: int) -> MatrixDescriptor:
    """As the kernel makes it (`operand_descriptor`, summed over columns), moved to the k-step's columns."""
    return MatrixDescriptor(start + K_STEP * 2 * DEPTH, CHUNK_BYTES, _MATRIX_ROWS * PANEL_ROW_BYTES, 0, Swizzle.B128)
