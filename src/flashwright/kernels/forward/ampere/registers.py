"""Registers of an Ampere config's operands, and an estimate of its kernel's registers before anything is compiled."""

from __future__ import annotations

from flashwright.hardware.architectures import architecture
from flashwright.hardware.residency import resident_blocks
from flashwright.hardware.units import FRAGMENT, MMA_ROWS
from flashwright.kernels.explanation import Estimate, OperandRegisters, RegisterPhase
from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes, GemmShape

OTHER_REGISTERS = 20
"""Of addresses, counters and temporaries, on top of the operands. 56 kernels of d_head 128, compiled for sm_80 by NVRTC
13.4, were all within 18 registers of the estimate."""


def estimate(config: FlashForwardKernelConfig, arch: str) -> Estimate:
    """Raises `ValueError` for a config that no kernel can be built from."""
    shapes, sm = ForwardKernelTileShapes(config), architecture(arch)
    operands = max(phase.total for phase in register_phases(config))
    registers = min(operands + OTHER_REGISTERS, sm.registers_per_thread)
    limits = resident_blocks(sm, threads=shapes.threads, registers=registers, shared_bytes=shapes.shared_bytes)
    return Estimate(arch, operands, OTHER_REGISTERS, sm.registers_per_thread, min(limits.values()))


def register_phases(config: FlashForwardKernelConfig) -> tuple[RegisterPhase, ...]:
    """The operands alive in each part of a KV step. Addresses, counters and temporaries come on top."""
    derived = ForwardKernelTileShapes(config)
    rows, row_tiles = derived.QO_rows_per_warp, derived.QO_rows_per_warp // MMA_ROWS
    O = _accumulator("O accumulator", rows, config.d_head, derived.O_accumulator_registers)  # noqa: E741
    S = _accumulator("S accumulator", rows, config.B_c, derived.S_accumulator_registers)
    P = OperandRegisters("P operand", derived.P_operand_registers, f"{rows} × {config.B_c} at 16 bits ÷ 32 lanes")
    Q = _fragments("Q fragments", rows, derived.QK, derived.Q_rmem_tile_buffers, derived.Q_operand_registers)
    K = _fragments("K fragments", config.B_c, derived.QK, derived.K_rmem_tile_buffers, derived.K_operand_registers)
    V = _fragments("V fragments", config.d_head, derived.PV, derived.V_rmem_tile_buffers, derived.V_operand_registers)
    sums = 4 if config.mma_row_sum else 2  # an accumulator of the tensor cores, or plain sums
    tiles = f"{row_tiles} tile{'s' if row_tiles > 1 else ''} of {MMA_ROWS} rows"
    row_state = OperandRegisters("row max and sum", row_tiles * (2 + sums), f"{tiles} × (2 maxima + {sums} sums)")
    held_Q = (Q,) if derived.QK.A_load_entire_block_into_rf else ()
    return (
        RegisterPhase("S = QKᵀ", (O, S, Q, K, row_state)),
        RegisterPhase("softmax", (O, S, *held_Q, row_state)),
        RegisterPhase("O += PV", (O, P, *held_Q, V, row_state)),
    )


def _accumulator(name: str, rows: int, columns: int, registers: int) -> OperandRegisters:
    return OperandRegisters(name, registers, f"{rows} × {columns} in fp32 ÷ 32 lanes")


def _fragments(name: str, outer: int, gemm: GemmShape, buffers: int, registers: int) -> OperandRegisters:
    width = gemm.tile_fragments * FRAGMENT
    count = "1 tile" if buffers == 1 else f"{buffers} tiles"
    return OperandRegisters(name, registers, f"{count} of {outer} × {width} at 16 bits ÷ 32 lanes")
