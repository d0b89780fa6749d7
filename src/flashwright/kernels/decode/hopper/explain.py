"""What a config of the Hopper decode means: its knobs in words, its operands' registers, its shared memory.

Arithmetic on the config alone; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from flashwright.kernels.decode.hopper.config import WARPGROUP_ROWS, WARPS_PER_WARPGROUP, HopperDecodeKernelConfig
from flashwright.kernels.decode.hopper.shapes import BARRIER_PAIR_BYTES, HopperDecodeShapes
from flashwright.kernels.explanation import (
    CONSUMER,
    CoreMatrices,
    Explanation,
    Knob,
    OperandRegisters,
    Product,
    Reallocation,
    RegisterPhase,
    Shape,
    SharedMap,
    SharedRegion,
    TracedWarp,
    doubled_and_halved,
)

_SIZES = ("B_r", "B_c")
KNOBS_TO_TURN: tuple[str, ...] = (*_SIZES, "stages")
"""All but `dtype` and `d_head`, which say what is computed, not how."""
WARPGROUPS_THAT_SHARE = 3
"""With so many in a thread block, the producers give registers to the consumers."""


def knobs(config: HopperDecodeKernelConfig) -> tuple[Knob, ...]:
    """Every field of the config, with what its value does."""
    groups = "one consumer warpgroup" if config.n_consumers == 1 else f"{config.n_consumers} consumer warpgroups"
    meanings = {
        "dtype": "element type of all tensors; products, softmax and partial results are in fp32",
        "d_head": "columns of all tensors",
        "B_r": f"packed rows of a tile, of all heads of Q that share a head of K and V: {groups}",
        "B_c": "keys of a step",
        "stages": "steps whose keys and values are in shared memory or on their way to it",
    }
    return tuple(
        Knob(
            each.name,
            config.dtype.name if each.name == "dtype" else str(getattr(config, each.name)),
            None,
            meanings[each.name],
        )
        for each in fields(config)
    )


def shapes(config: HopperDecodeKernelConfig) -> tuple[Shape, ...]:
    """The derived sizes, by the names the kernel uses."""
    derived = HopperDecodeShapes(config)
    meanings = {
        "threads": "threads per block, those of the producer warpgroup included",
        "unit_keys": "keys of a step, the unit that splits consist of",
        "Q_bytes": "of a consumer warpgroup's rows",
        "KV_bytes": "of the keys of a step, and again of its values",
    }
    return tuple(Shape(name, getattr(derived, name), meaning) for name, meaning in meanings.items())


def register_phases(config: HopperDecodeKernelConfig) -> tuple[RegisterPhase, ...]:
    """The operands alive in each part of a consumer's step. Addresses, counters and temporaries come on top."""
    rows = WARPGROUP_ROWS // WARPS_PER_WARPGROUP

    def operand(name: str, columns: int, bits: int) -> OperandRegisters:
        text = f"{rows} × {columns} {'in fp32' if bits == 32 else 'at 16 bits'} ÷ 32 lanes"
        return OperandRegisters(name, rows * columns * bits // 32 // 32, text)

    sums, S = operand("O accumulator", config.d_head, 32), operand("S accumulator", config.B_c, 32)
    Q = (operand("Q operand", config.d_head, 16),) if HopperDecodeShapes(config).Q_in_registers else ()
    operands = (sums, S, operand("P operand", config.B_c, 16), *Q)
    return (RegisterPhase("S, O issued", operands), RegisterPhase("softmax", operands))


def shared_map(config: HopperDecodeKernelConfig) -> SharedMap:
    """Where the blocks lie, by byte offset."""
    derived = HopperDecodeShapes(config)
    regions = [
        SharedRegion(f"Q {warpgroup}", "Q", warpgroup * derived.Q_bytes, derived.Q_bytes, f"consumer {warpgroup}")
        for warpgroup in range(config.n_consumers)
    ]
    for operand, start in (("K", derived.K_offset), ("V", derived.V_offset)):
        for stage in range(config.stages):
            offset = start + stage * derived.KV_bytes
            regions.append(SharedRegion(f"{operand}, stage {stage}", operand, offset, derived.KV_bytes))
    pairs = 2 * config.stages
    regions.append(
        SharedRegion(
            "barriers", "B", derived.barriers_offset, pairs * BARRIER_PAIR_BYTES, f"{pairs} pairs: full, empty"
        )
    )
    return SharedMap(tuple(regions), derived.shared_bytes)


def hands_over_registers(config: HopperDecodeKernelConfig) -> bool:
    return config.n_consumers + 1 >= WARPGROUPS_THAT_SHARE


def register_limit(config: HopperDecodeKernelConfig) -> int | None:
    return HopperDecodeShapes(config).consumer_registers if hands_over_registers(config) else None


def reallocations(config: HopperDecodeKernelConfig) -> tuple[Reallocation, ...]:
    derived = HopperDecodeShapes(config)
    if not hands_over_registers(config):
        return ()
    return (
        Reallocation("producers", derived.producer_registers, "gives back what it does not need"),
        Reallocation("consumers", derived.consumer_registers, "takes what the producers gave back"),
    )


def neighbours(config: HopperDecodeKernelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each change of one knob worth examining: in words, and as fields for `dataclasses.replace`."""
    yield from doubled_and_halved(config, _SIZES)
    for other in (config.stages - 1, config.stages + 1):
        yield f"stages: {config.stages} → {other}", {"stages": other}


def warps(config: HopperDecodeKernelConfig) -> tuple[TracedWarp, ...]:
    """The first warp of the first consumer warpgroup. Its first step has no product to overlap with."""
    return (TracedWarp(0, "consumer warpgroup 0", CONSUMER, steps_before_loop=1),)


def banks(config: HopperDecodeKernelConfig) -> CoreMatrices:
    return CoreMatrices.of_panels("K", "S = QKᵀ", HopperDecodeShapes(config).K_offset, config.B_c)


EXPLANATION = Explanation(
    knobs=knobs,
    knobs_to_turn=KNOBS_TO_TURN,
    neighbours=neighbours,
    shapes=shapes,
    register_phases=register_phases,
    shared_map=shared_map,
    work_per_step=lambda config: WARPGROUP_ROWS // WARPS_PER_WARPGROUP * config.B_c,
    register_limit=register_limit,
    reallocations=reallocations,
    warps=warps,
    banks=banks,
    product=Product.WGMMA,
)
