"""What a config of the Ampere backward means: its knobs in words, its operands' registers, its shared memory.

Arithmetic on the config alone; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from flashwright.hardware.units import MMA_K, MMA_ROWS, WARP_THREADS
from flashwright.kernels.backward.ampere.config import AmpereBackwardKernelConfig
from flashwright.kernels.backward.ampere.shapes import AmpereBackwardShapes
from flashwright.kernels.backward.explanations import ORDERED, common_meanings, stage_changes
from flashwright.kernels.explanation import (
    SWIZZLED,
    ExecutedLoads,
    Explanation,
    Knob,
    OperandRegisters,
    RegisterPhase,
    Shape,
    SharedMap,
    SharedRegion,
    TimelineTexts,
    doubled_and_halved,
    loads_of_keys,
    swizzle_turned,
    turned,
)

_SWITCHES: dict[str, tuple[str, str]] = {
    "swizzled": SWIZZLED,
    "late_dQ": (
        "dQ of a block is computed in the next step, from a second buffer of dS: of the warps that share a scheduler, "
        "some multiply while others exponentiate",
        "dQ of a block is computed at the end of its step, by all warps at once",
    ),
    "ordered": ORDERED,
}
_SLICES = (
    "S and dP of all queries of a warp at a time",
    "S and dP of a warp's queries in {} slices, one after the other: fewer registers, more reads of K and V",
)
_SIZES = ("B_r", "B_c", "n_warps", "parts", "slices")
KNOBS_TO_TURN: tuple[str, ...] = (*_SIZES, "Q_stages", "dO_stages", *_SWITCHES)
"""All but `dtype` and `d_head`, which say what is computed, not how."""
MOST_STAGES = 2
ELEMENTS_PER_REGISTER = 2


def knobs(config: AmpereBackwardKernelConfig) -> tuple[Knob, ...]:
    """Every field of the config, with what its value does."""
    return tuple(_knob(config, field.name) for field in fields(config))


def _knob(config: AmpereBackwardKernelConfig, name: str) -> Knob:
    value = getattr(config, name)
    if name in _SWITCHES:
        return Knob(name, "on" if value else "off", value, _SWITCHES[name][0 if value else 1])
    meanings = common_meanings(config) | {
        "n_warps": "warps per thread block",
        "parts": f"warps that share the same keys; {_division_of_work(config)}",
        "slices": _SLICES[config.slices > 1].format(config.slices),
    }
    return Knob(name, value.name if name == "dtype" else str(value), None, meanings[name])


def _division_of_work(config: AmpereBackwardKernelConfig) -> str:
    try:
        shapes = AmpereBackwardShapes(config)
    except ValueError:
        return f"no kernel divides {config.B_c} keys among them"
    if config.parts == 1:
        return (
            f"each has {shapes.keys_per_warp} keys and all queries: P and dS are operands in the registers they are in"
        )
    return (
        f"{config.parts} share {shapes.keys_per_warp} keys, {config.B_r // config.parts} queries each: they pass P and "
        "dS to each other through shared memory"
    )


def shapes(config: AmpereBackwardKernelConfig) -> tuple[Shape, ...]:
    """The derived sizes, by the names the kernel uses."""
    derived = AmpereBackwardShapes(config)
    meanings = {
        "threads": "threads per block",
        "keys_per_warp": "keys of a warp in S, dP, dV and dK",
        "slice_queries": "queries of a warp in S and dP at a time",
        "row_tiles": f"tiles of {MMA_ROWS} keys of a warp",
        "dQ_row_groups": "groups of warps along the rows of dQ",
        "dQ_column_parts": "groups of warps along its columns",
        "key_bytes": "of K, and again of V, in shared memory",
        "query_bytes": "of a stage of Q or dO",
        "weight_bytes": "of a buffer of dS, and of P where warps share keys",
        "terms_bytes": "of what is known of each row of Q: its log-sum-exp, and O·dO",
    }
    return tuple(Shape(name, getattr(derived, name), meaning) for name, meaning in meanings.items())


def register_phases(config: AmpereBackwardKernelConfig) -> tuple[RegisterPhase, ...]:
    """The operands alive in each part of a step. Addresses, counters and temporaries come on top."""
    derived = AmpereBackwardShapes(config)
    keys, queries, columns = (
        derived.keys_per_warp,
        derived.slice_queries,
        config.d_head // config.parts,
    )
    dK, dV = (_accumulator(name, keys, columns, derived.gradient_registers) for name in ("dK", "dV"))
    S, dP = (_accumulator(name, keys, queries, derived.score_registers) for name in ("S", "dP"))
    P, dS = (
        OperandRegisters(f"{name} operand", derived.score_registers // 2, f"{keys} × {queries} at 16 bits ÷ 32 lanes")
        for name in ("P", "dS")
    )
    dQ = OperandRegisters(
        "dQ accumulator",
        derived.dQ_registers,
        f"{config.B_r} × {config.d_head} in fp32 ÷ {derived.threads} threads",
    )
    scores = _fragments("K, Q fragments", keys, queries)
    gradients = _fragments("Q, dO fragments", 0, columns)
    return (
        RegisterPhase("S and dP", (dK, dV, S, dP, scores)),
        RegisterPhase("P and dS", (dK, dV, S, dP)),
        RegisterPhase("dV and dK", (dK, dV, P, dS, gradients)),
        RegisterPhase("dQ", (dK, dV, dQ)),
    )


def _accumulator(name: str, rows: int, columns: int, registers: int) -> OperandRegisters:
    return OperandRegisters(f"{name} accumulator", registers, f"{rows} × {columns} in fp32 ÷ 32 lanes")


def _fragments(name: str, left_rows: int, right_rows: int) -> OperandRegisters:
    """Operands of a product that come from shared memory, 16 deep at a time."""
    rows = left_rows + right_rows
    registers = rows * MMA_K // ELEMENTS_PER_REGISTER // WARP_THREADS
    sides = f"({left_rows} + {right_rows})" if left_rows else str(right_rows)
    return OperandRegisters(name, registers, f"{sides} × {MMA_K} at 16 bits ÷ 32 lanes")


def shared_map(config: AmpereBackwardKernelConfig) -> SharedMap:
    """Where the blocks lie, by byte offset."""
    derived = AmpereBackwardShapes(config)
    regions = [
        SharedRegion("K", "K", derived.K_offset, derived.key_bytes, "stays"),
        SharedRegion("V", "V", derived.V_offset, derived.key_bytes, "stays"),
    ]
    for operand, start, stages in (
        ("Q", derived.Q_offset, config.Q_stages),
        ("dO", derived.dO_offset, config.dO_stages),
    ):
        for stage in range(stages):
            name = f"{operand}, stage {stage}" if stages > 1 else operand
            note = ("even steps", "odd steps")[stage] if stages > 1 else "every step"
            regions.append(SharedRegion(name, operand, start + stage * derived.query_bytes, derived.query_bytes, note))
    for buffer in range(derived.dS_buffers):
        name, note = (f"dS, buffer {buffer}", ("even steps", "odd steps")[buffer]) if config.late_dQ else ("dS", "")
        start = derived.dS_offset + buffer * derived.weight_bytes
        regions.append(SharedRegion(name, "dS", start, derived.weight_bytes, note))
    if config.parts > 1:
        regions.append(SharedRegion("P", "P", derived.P_offset, derived.weight_bytes))
    terms = config.Q_stages * derived.terms_bytes
    regions.append(SharedRegion("terms", "terms", derived.terms_offset, terms, "lse, O·dO", is_block=False))
    return SharedMap(tuple(regions), derived.shared_bytes)


def neighbours(config: AmpereBackwardKernelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each change of one knob worth examining: in words, and as fields for `dataclasses.replace`."""
    yield from doubled_and_halved(config, _SIZES)
    yield from stage_changes(config, MOST_STAGES)
    yield from turned(config, tuple(_SWITCHES))


def banks(config: AmpereBackwardKernelConfig) -> ExecutedLoads:
    return loads_of_keys(config, AmpereBackwardShapes(config).shared_layout, config.B_c)


TIMELINE = TimelineTexts(
    introduction=(
        "The PTX that one warp executed on the simulated GPU, in order, over two steps in the middle of the loop over "
        "queries. A bar above says which block is on its way: framed while its copy is being started, plain until the "
        "wait that makes it arrive."
    ),
    nothing_to_hide_behind="nothing to hide behind: the warp waits for it at once",
)

EXPLANATION = Explanation(
    knobs=knobs,
    knobs_to_turn=KNOBS_TO_TURN,
    neighbours=neighbours,
    shapes=shapes,
    register_phases=register_phases,
    shared_map=shared_map,
    also_drawn=lambda config: (swizzle_turned(config),),
    banks=banks,
    products={},
    timeline=TIMELINE,
)
