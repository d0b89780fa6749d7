"""What one `wgmma` reads of an operand in shared memory: core matrices of 8 rows by 16 bytes, by its descriptor."""

from __future__ import annotations

from flashwright.hardware.tensor_map import Swizzle
from flashwright.hardware.units import ELEMENT_BYTES
from flashwright.kernels.explanation import CoreMatrices
from flashwright.kernels.family import KernelConfig
from flashwright.simulator.access_patterns import WAVEFRONT_BYTES
from flashwright.simulator.matrix_descriptor import CHUNK_BYTES, DEPTH, MatrixDescriptor
from flashwright.workbench.explain.facts import LaneAccess, MatrixLoad

K_STEP = 1
"""The product's second instruction: its columns do not begin at the row's first byte."""
ROWS_SHOWN = 16
_MATRIX_ROWS = 8
_CHUNKS_PER_STEP = ELEMENT_BYTES * DEPTH // CHUNK_BYTES


def core_matrix_facts(config: KernelConfig, operand: CoreMatrices) -> tuple[MatrixLoad, ...]:
    """The first four core matrices that an instruction reads, as they lie and as they would lie without swizzle."""
    return tuple(_core_matrices(config, operand, swizzle) for swizzle in dict.fromkeys((operand.swizzle, Swizzle.NONE)))


def _core_matrices(config: KernelConfig, operand: CoreMatrices, swizzle: Swizzle) -> MatrixLoad:
    rows, chunks_per_row = min(ROWS_SHOWN, operand.rows), operand.row_bytes // CHUNK_BYTES
    chunk_of_address = {
        int(swizzle.apply(operand.start + CHUNK_BYTES * chunk)): divmod(chunk, chunks_per_row)
        for chunk in range(rows * chunks_per_row)
    }
    address_of_chunk = {chunk: address for address, chunk in chunk_of_address.items()}
    # Eight rows of the first 16 bytes, then of the next; then both of the rows below.
    matrices = [(group, chunk) for group in range(rows // _MATRIX_ROWS) for chunk in range(_CHUNKS_PER_STEP)]
    lanes = []
    for matrix, (group, chunk) in enumerate(matrices):
        for row in range(group * _MATRIX_ROWS, (group + 1) * _MATRIX_ROWS):
            address = (
                address_of_chunk[row, K_STEP * _CHUNKS_PER_STEP + chunk]
                if swizzle is Swizzle.NONE
                else int(_descriptor(operand).chunk_addresses(operand.rows, is_mn_major=False)[row, chunk])
            )
            number = matrix * _MATRIX_ROWS + row % _MATRIX_ROWS
            lanes.append(LaneAccess(number, address, *chunk_of_address[address]))
    groups = [[lane.bank_group for lane in lanes if lane.lane // _MATRIX_ROWS == m] for m in range(len(matrices))]
    return MatrixLoad(
        config=config.short_form(),
        swizzled=swizzle is not Swizzle.NONE,
        operand=operand.operand,
        instruction=f"wgmma.mma_async.sync.aligned.m64n{operand.rows}k{DEPTH}",
        source=f"k-step {K_STEP} of {operand.product}: columns {K_STEP * DEPTH} to {(K_STEP + 1) * DEPTH - 1}",
        lanes=tuple(lanes),
        wavefronts=sum(max(of_matrix.count(group) for group in of_matrix) for of_matrix in groups),
        wavefronts_ideal=len(matrices),
        bank_groups=tuple(
            tuple(address_of_chunk[row, chunk] % WAVEFRONT_BYTES // CHUNK_BYTES for chunk in range(chunks_per_row))
            for row in range(rows)
        ),
        readers="rows",
    )


def _descriptor(operand: CoreMatrices) -> MatrixDescriptor:
    """As a kernel makes it of an operand that is summed over its columns, moved to the k-step's columns."""
    start = operand.start + K_STEP * ELEMENT_BYTES * DEPTH
    return MatrixDescriptor(start, CHUNK_BYTES, _MATRIX_ROWS * operand.row_bytes, 0, operand.swizzle)
