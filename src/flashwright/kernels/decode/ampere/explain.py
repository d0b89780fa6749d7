"""What a config of the Ampere decode means: its knobs in words, its operands' registers, its shared memory.

Arithmetic on the config alone; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from flashwright.hardware.units import MMA_K, MMA_ROWS, WARP_THREADS
from flashwright.kernels.decode.ampere.config import AmpereDecodeKernelConfig
from flashwright.kernels.decode.ampere.shapes import AmpereDecodeShapes
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
    TracedWarp,
    doubled_and_halved,
    loads_of_keys,
    swizzle_turned,
    turned,
)

_SWITCHES: dict[str, tuple[str, str]] = {
    "swizzled": SWIZZLED,
}
_SIZES = ("B_r", "keys_per_warp", "n_warps", "row_warps")
KNOBS_TO_TURN: tuple[str, ...] = (*_SIZES, "stages", "blocks_per_sm", *_SWITCHES)
"""All but `dtype` and `d_head`, which say what is computed, not how."""
ELEMENTS_PER_REGISTER = 2


def knobs(config: AmpereDecodeKernelConfig) -> tuple[Knob, ...]:
    """Every field of the config, with what its value does."""
    return tuple(_knob(config, field.name) for field in fields(config))


def _knob(config: AmpereDecodeKernelConfig, name: str) -> Knob:
    value = getattr(config, name)
    if name in _SWITCHES:
        return Knob(name, "on" if value else "off", value, _SWITCHES[name][0 if value else 1])
    along_rows = "each with rows of its own" if config.row_warps > 1 else "none shares its keys with another"
    meanings = {
        "dtype": "element type of all tensors; products, softmax and partial results are in fp32",
        "d_head": "columns of all tensors",
        "B_r": "packed rows of a tile: those of all heads of Q that share a head of K and V",
        "keys_per_warp": "keys of a step that one warp computes with",
        "n_warps": f"warps per thread block; a step has {config.B_c} keys",
        "row_warps": f"warps that share the same keys: {along_rows}",
        "stages": "steps whose keys and values are in shared memory or on their way to it",
        "blocks_per_sm": "thread blocks that a multiprocessor computes at a time",
    }
    return Knob(name, value.name if name == "dtype" else str(value), None, meanings[name])


def shapes(config: AmpereDecodeKernelConfig) -> tuple[Shape, ...]:
    """The derived sizes, by the names the kernel uses."""
    derived = AmpereDecodeShapes(config)
    meanings = {
        "threads": "threads per block",
        "key_warps": "warps with different keys, whose results are combined at the end of a segment",
        "unit_keys": "keys of a step, the unit that splits consist of",
        "row_tiles": f"tiles of {MMA_ROWS} packed rows of a warp",
        "chunk_bytes": "of a warp's keys and values in a stage",
    }
    return tuple(Shape(name, getattr(derived, name), meaning) for name, meaning in meanings.items())


def register_phases(config: AmpereDecodeKernelConfig) -> tuple[RegisterPhase, ...]:
    """The operands alive in each part of a step. Addresses, counters and temporaries come on top."""
    derived = AmpereDecodeShapes(config)
    rows, keys = derived.row_tiles * MMA_ROWS, config.keys_per_warp
    sums = OperandRegisters("O accumulator", derived.O_registers, f"{rows} × {config.d_head} in fp32 ÷ 32 lanes")
    S = OperandRegisters("S accumulator", derived.S_registers, f"{rows} × {keys} in fp32 ÷ 32 lanes")
    P = OperandRegisters("P operand", derived.S_registers // 2, f"{rows} × {keys} at 16 bits ÷ 32 lanes")
    return (
        RegisterPhase("S = QKᵀ", (sums, S, _fragments("Q, K fragments", rows, keys))),
        RegisterPhase("softmax", (sums, S)),
        RegisterPhase("O += PV", (sums, P, _fragments("V fragments", 0, config.d_head))),
    )


def _fragments(name: str, left_rows: int, right_rows: int) -> OperandRegisters:
    """Operands of a product that come from shared memory, 16 deep at a time."""
    registers = (left_rows + right_rows) * MMA_K // ELEMENTS_PER_REGISTER // WARP_THREADS
    sides = f"({left_rows} + {right_rows})" if left_rows else str(right_rows)
    return OperandRegisters(name, registers, f"{sides} × {MMA_K} at 16 bits ÷ 32 lanes")


def shared_map(config: AmpereDecodeKernelConfig) -> SharedMap:
    """Where the blocks lie, by byte offset: of each stage the keys and values of the first warp, then those of the
    others."""
    derived = AmpereDecodeShapes(config)
    half, stage_bytes = derived.chunk_bytes // 2, derived.key_warps * derived.chunk_bytes
    regions = [
        SharedRegion(f"Q {slot}", "Q", slot * derived.Q_bytes, derived.Q_bytes, "of a segment")
        for slot in range(config.stages)
    ]
    for stage in range(config.stages):
        start = derived.stages_offset + stage * stage_bytes
        note = f"steps {stage}, {stage + config.stages}, …"
        regions += [
            SharedRegion(f"K of warp 0, stage {stage}", "K", start, half, note),
            SharedRegion(f"V of warp 0, stage {stage}", "V", start + half, half, note),
        ]
        if derived.key_warps > 1:
            rest = stage_bytes - derived.chunk_bytes
            start += derived.chunk_bytes
            regions.append(SharedRegion(f"other warps, stage {stage}", "K and V", start, rest, "laid out alike"))
    results_end = derived.stages_offset + config.stages * stage_bytes
    if results_end < derived.terms_offset:
        size = derived.terms_offset - results_end
        regions.append(
            SharedRegion("results", "O", results_end, size, "rows of O of each warp, at the end of a segment")
        )
    size = derived.shared_bytes - derived.terms_offset
    regions.append(SharedRegion("terms", "terms", derived.terms_offset, size, "maxima and sums of each warp"))
    return SharedMap(tuple(regions), derived.shared_bytes)


def neighbours(config: AmpereDecodeKernelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each change of one knob worth examining: in words, and as fields for `dataclasses.replace`."""
    yield from doubled_and_halved(config, _SIZES)
    for other in (config.stages - 1, config.stages + 1):
        yield f"stages: {config.stages} → {other}", {"stages": other}
    yield from doubled_and_halved(config, ("blocks_per_sm",))
    yield from turned(config, tuple(_SWITCHES))


def banks(config: AmpereDecodeKernelConfig) -> ExecutedLoads:
    return loads_of_keys(config, AmpereDecodeShapes(config).shared_layout, config.keys_per_warp)


TIMELINE = TimelineTexts(
    introduction=(
        "The PTX that one warp executed on the simulated GPU, in order, over two steps in the middle of the loop over "
        "keys. A bar above says which block is on its way: framed while its copy is being started, plain until the "
        "wait that makes it arrive. The warp copies its own keys, and waits for nobody else's."
    ),
)

EXPLANATION = Explanation(
    knobs=knobs,
    knobs_to_turn=KNOBS_TO_TURN,
    neighbours=neighbours,
    shapes=shapes,
    register_phases=register_phases,
    shared_map=shared_map,
    also_drawn=lambda config: (swizzle_turned(config),),
    warps=lambda config: (TracedWarp(0, steps_ahead=config.stages - 1),),
    banks=banks,
    timeline=TIMELINE,
)
