"""What a config of the latent decode means: its knobs in words, its operands' registers, its shared memory.

Arithmetic on the config alone; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from flashwright.kernels.decode.latent.config import (
    CONSUMERS,
    D_VALUE,
    WARPS_PER_WARPGROUP,
    LatentDecodeKernelConfig,
)
from flashwright.kernels.decode.latent.shapes import (
    BARRIER_PAIR_BYTES,
    PAIR_BYTES,
    PARTS,
    WARPGROUP_THREADS,
    LatentDecodeShapes,
)
from flashwright.kernels.explanation import (
    CONSUMER,
    CoreMatrices,
    Explanation,
    Knob,
    OperandRegisters,
    Reallocation,
    RegisterPhase,
    Shape,
    SharedMap,
    SharedRegion,
    TracedWarp,
    doubled_and_halved,
)

KNOBS_TO_TURN: tuple[str, ...] = ("B_c", "stages")
"""Those that have more than one value and say how it is computed."""


def knobs(config: LatentDecodeKernelConfig) -> tuple[Knob, ...]:
    """Every field of the config, with what its value does."""
    meanings = {
        "dtype": "element type of all tensors; products, softmax and partial results are in fp32",
        "d_head": f"columns of a key, of which the first {D_VALUE} are its value",
        "B_r": "packed rows of a tile, of all heads of Q that share a head of keys",
        "B_c": "keys of a step, which are read once for both products",
        "stages": "steps whose keys are in shared memory or on their way to it",
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


def shapes(config: LatentDecodeKernelConfig) -> tuple[Shape, ...]:
    """The derived sizes, by the names the kernel uses."""
    derived = LatentDecodeShapes(config)
    meanings = {
        "threads": "threads per block: the scorer, the follower and the producer warpgroup",
        "unit_keys": "keys of a step, the unit that splits consist of",
        "d_value": "columns of O, half of them in either consumer's registers",
        "Q_bytes": "of the rows of Q",
        "K_bytes": "of the keys of a step",
        "P_bytes": "of the weights of a step, which the scorer hands to the follower",
    }
    return tuple(Shape(name, getattr(derived, name), meaning) for name, meaning in meanings.items())


def register_phases(config: LatentDecodeKernelConfig) -> tuple[RegisterPhase, ...]:
    """The operands alive in each part of the scorer's step. Addresses, counters and temporaries come on top."""
    rows = config.B_r // WARPS_PER_WARPGROUP

    def operand(name: str, columns: int, bits: int) -> OperandRegisters:
        text = f"{rows} × {columns} {'in fp32' if bits == 32 else 'at 16 bits'} ÷ 32 lanes"
        return OperandRegisters(name, rows * columns * bits // 32 // 32, text)

    operands = (
        operand("O accumulator", D_VALUE // CONSUMERS, 32),
        operand("S accumulator", config.B_c, 32),
        operand("P operand", config.B_c, 16),
    )
    return (RegisterPhase("S, O issued", operands), RegisterPhase("softmax", operands))


def shared_map(config: LatentDecodeKernelConfig) -> SharedMap:
    """Where the blocks lie, by byte offset."""
    derived = LatentDecodeShapes(config)
    regions = [SharedRegion("Q", "Q", 0, derived.Q_bytes, "of all heads in the tile")]
    for stage in range(config.stages):
        offset = derived.K_offset + stage * derived.K_bytes
        regions.append(SharedRegion(f"K, stage {stage}", "K", offset, derived.K_bytes))
    pairs = PARTS * config.stages
    regions += [
        SharedRegion("P", "P", derived.P_offset, derived.P_bytes, "from the scorer to the follower"),
        SharedRegion("factors", "factors", derived.factors_offset, WARPGROUP_THREADS * PAIR_BYTES, "what O shrinks by"),
        SharedRegion("terms", "terms", derived.terms_offset, config.B_r * PAIR_BYTES, "maxima and sums of rows"),
        SharedRegion(
            "barriers", "B", derived.barriers_offset, pairs * BARRIER_PAIR_BYTES, f"{pairs} pairs: full, empty"
        ),
    ]
    return SharedMap(tuple(regions), derived.shared_bytes)


def reallocations(config: LatentDecodeKernelConfig) -> tuple[Reallocation, ...]:
    derived = LatentDecodeShapes(config)
    return (
        Reallocation("producers", derived.producer_registers, "gives back what it does not need"),
        Reallocation("consumers", derived.consumer_registers, "takes what the producers gave back"),
    )


def neighbours(config: LatentDecodeKernelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each change of one knob worth examining: in words, and as fields for `dataclasses.replace`."""
    yield from doubled_and_halved(config, ("B_c",))
    for other in (config.stages - 1, config.stages + 1):
        yield f"stages: {config.stages} → {other}", {"stages": other}


def warps(config: LatentDecodeKernelConfig) -> tuple[TracedWarp, ...]:
    """The first warp of the scorer. Its first step has no product to overlap with."""
    return (TracedWarp(0, "scorer", CONSUMER, steps_before_loop=1),)


def banks(config: LatentDecodeKernelConfig) -> CoreMatrices:
    return CoreMatrices.of_panels("K", "S = QKᵀ", LatentDecodeShapes(config).K_offset, config.B_c)


EXPLANATION = Explanation(
    knobs=knobs,
    knobs_to_turn=KNOBS_TO_TURN,
    neighbours=neighbours,
    shapes=shapes,
    register_phases=register_phases,
    shared_map=shared_map,
    work_per_step=lambda config: config.B_r // WARPS_PER_WARPGROUP * config.B_c,
    register_limit=lambda config: LatentDecodeShapes(config).consumer_registers,
    reallocations=reallocations,
    warps=warps,
    banks=banks,
)
