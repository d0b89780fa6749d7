"""What a config of the Hopper backward means: its knobs in words, its operands' registers, its shared memory.

Arithmetic on the config alone; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from flashwright.kernels.backward.explanations import ORDERED, common_meanings, stage_changes
from flashwright.kernels.backward.hopper.config import MAX_STAGES, WARPGROUP_ROWS, HopperBackwardKernelConfig
from flashwright.kernels.backward.hopper.shapes import (
    NOTE_BYTES,
    PANEL_COLUMNS,
    TILE_STAGES,
    WARPGROUP_THREADS,
    WEIGHT_STAGES,
    HopperBackwardShapes,
)
from flashwright.kernels.explanation import (
    CONSUMER,
    PRODUCER,
    CoreMatrices,
    Explanation,
    Knob,
    OperandRegisters,
    Reallocation,
    RegisterPhase,
    Shape,
    SharedMap,
    SharedRegion,
    TimelineTexts,
    TracedWarp,
    doubled_and_halved,
    turned,
)

_SWITCHES: dict[str, tuple[str, str]] = {
    "P_in_registers": (
        "P and dS are the left operands of dV and dK in the registers that hold them; dQ reads dS in shared memory",
        "P goes through shared memory to the product dV, as dS does to dK and dQ",
    ),
    "bulk_dQ": (
        "dQ goes through shared memory, from where the copy engine adds it",
        "dQ is added from the registers that hold it, in vectors",
    ),
    "paired": (
        "two thread blocks of a cluster exchange dS: each adds half of the columns of dQ, summed over the keys of both",
        "a thread block adds dQ of its own keys",
    ),
    "ordered": ORDERED,
    "persistent": (
        "a thread block for each multiprocessor owns several blocks of keys, one after the other: the next one's "
        "copies run while this one's gradients are written; a pair takes two neighbouring blocks at a time",
        "a thread block for each block of keys",
    ),
    "keys_ahead": (
        "two blocks of K and V in shared memory: the next ones are copied during the steps of these",
        "one block of K and V in shared memory",
    ),
    "skips_masked": (
        "a warpgroup leaves out a tile's first step where a causal mask hides its keys from all queries of that step",
        "warpgroups compute all steps of a tile",
    ),
    "finishes_dQ": (
        "blocks of keys take turns at a block of dQ: the first writes over what is there, and the last rounds the sum; "
        "no kernel comes after",
        "sums of dQ begin at zero, and a kernel after this one rounds them",
    ),
}
_SIZES = ("B_r", "B_c", "n_consumers")
KNOBS_TO_TURN: tuple[str, ...] = (*_SIZES, "Q_stages", "dO_stages", *_SWITCHES)
"""All but `dtype` and `d_head`, which say what is computed, not how."""


def knobs(config: HopperBackwardKernelConfig) -> tuple[Knob, ...]:
    """Every field of the config, with what its value does."""
    return tuple(_knob(config, field.name) for field in fields(config))


def _knob(config: HopperBackwardKernelConfig, name: str) -> Knob:
    value = getattr(config, name)
    if name in _SWITCHES:
        return Knob(name, "on" if value else "off", value, _SWITCHES[name][0 if value else 1])
    meanings = common_meanings(config) | {
        "n_consumers": f"warpgroups that compute, {WARPGROUP_ROWS} keys each, or {WARPGROUP_ROWS} keys and half of the "
        "queries; one more warpgroup copies"
    }
    return Knob(name, value.name if name == "dtype" else str(value), None, meanings[name])


def shapes(config: HopperBackwardKernelConfig) -> tuple[Shape, ...]:
    """The derived sizes, by the names the kernel uses."""
    derived = HopperBackwardShapes(config)
    meanings = {
        "threads": "threads per block: the consumers', and a warpgroup's that copies, keeps turns and takes tiles",
        "key_groups": f"groups of {WARPGROUP_ROWS} keys",
        "parts": "warpgroups that share the same keys: queries of S and dP, columns of dV and dK",
        "dQ_column_parts": "warpgroups along the columns of dQ; the others stand along its rows",
        "panels": f"stretches of {PANEL_COLUMNS} columns in which a tile lies in shared memory",
        "key_group_bytes": f"of {WARPGROUP_ROWS} rows of K, and again of V, in shared memory",
        "query_bytes": "of a stage of Q or dO: what its barrier counts until it is full, terms of the rows apart",
        "weight_group_bytes": f"of {WARPGROUP_ROWS} rows of dS, and of P where it is not in registers",
        "consumer_registers": "per consumer thread, after setmaxnreg.inc",
        "producer_registers": "per producer thread, after setmaxnreg.dec",
    }
    return tuple(Shape(name, getattr(derived, name), meaning) for name, meaning in meanings.items())


# --- Registers -------------------------------------------------------------------------------------------------


def register_phases(config: HopperBackwardKernelConfig) -> tuple[RegisterPhase, ...]:
    """The operands alive in each part of a step, per consumer thread. Addresses and temporaries come on top."""
    derived = HopperBackwardShapes(config)
    queries, columns = config.B_r // derived.parts, config.d_head // derived.parts
    dK, dV = (_accumulator(name, columns, derived.gradient_registers) for name in ("dK", "dV"))
    S, dP = (_accumulator(name, queries, derived.score_registers) for name in ("S", "dP"))
    dQ = _accumulator("dQ", config.d_head // derived.dQ_column_parts, derived.dQ_registers)
    P = OperandRegisters(
        "P operand", derived.score_registers // 2, f"{WARPGROUP_ROWS} × {queries} at 16 bits ÷ {WARPGROUP_THREADS}"
    )
    dS = replace(P, operand="dS operand")
    if not config.P_in_registers:
        beside = (dQ,) if config.paired else ()
        return (
            RegisterPhase("S and dP", (dK, dV, S, dP, *beside)),
            RegisterPhase("P and dS", (dK, dV, S, dP, *beside)),
            RegisterPhase("dQ, dV, dK", (dK, dV, dQ)),
        )
    return (
        RegisterPhase("S and dP", (dK, dV, S, dP)),
        RegisterPhase("P and dS", (dK, dV, S, dP)),
        RegisterPhase("dQ, dV, dK", (dK, dV, dQ, P, dS)),
    )


def _accumulator(name: str, columns: int, registers: int) -> OperandRegisters:
    return OperandRegisters(
        f"{name} accumulator", registers, f"{WARPGROUP_ROWS} × {columns} in fp32 ÷ {WARPGROUP_THREADS} threads"
    )


def register_limit(config: HopperBackwardKernelConfig) -> int | None:
    return HopperBackwardShapes(config).consumer_registers


def reallocations(config: HopperBackwardKernelConfig) -> tuple[Reallocation, ...]:
    derived = HopperBackwardShapes(config)
    return (
        Reallocation("consumer", derived.consumer_registers, "setmaxnreg.inc takes what the producer gave back"),
        Reallocation("producer", derived.producer_registers, "setmaxnreg.dec gives the others back"),
    )


# --- Shared memory ---------------------------------------------------------------------------------------------


def shared_map(config: HopperBackwardKernelConfig) -> SharedMap:
    """Where the tiles, what is known of their rows, and their barriers lie, by byte offset."""
    derived = HopperBackwardShapes(config)
    groups = derived.key_groups
    regions: list[SharedRegion] = []

    def add(operand: str, start: int, size: int, names: list[str], note: str = "") -> None:
        regions.extend(
            SharedRegion(name, operand, start + index * size, size, note) for index, name in enumerate(names)
        )

    for operand, start in (("K", derived.K_offset), ("V", derived.V_offset)):
        names = [f"{operand} {group}" for group in range(groups)]
        if config.keys_ahead:
            names = [f"{name}, stage {stage}" for stage in range(derived.key_stages) for name in names]
        add(operand, start, derived.key_group_bytes, names, "stays")
    for operand, start, stages in (
        ("Q", derived.Q_offset, config.Q_stages),
        ("dO", derived.dO_offset, config.dO_stages),
    ):
        add(operand, start, derived.query_bytes, [f"{operand}, stage {stage}" for stage in range(stages)])
    weights = [("dS", derived.dS_offset)] + ([] if config.P_in_registers else [("P", derived.P_offset)])
    for operand, start in weights:
        names = [f"{operand} {group}, stage {stage}" for stage in range(WEIGHT_STAGES) for group in range(groups)]
        add(operand, start, derived.weight_group_bytes, names)
    if config.bulk_dQ:
        add("dQ", derived.dQ_offset, derived.dQ_bytes, ["dQ"], "on its way to its sums")
    if config.paired:
        names = [f"received dS {group}, stage {stage}" for stage in range(WEIGHT_STAGES) for group in range(groups)]
        add("dS", derived.received_offset, derived.weight_group_bytes, names, "of the other thread block")
        add(
            "K", derived.other_K_offset, derived.other_K_bytes, [f"other K {group}" for group in range(groups)], "stays"
        )
    for name, start, stages in (
        ("log-sum-exps", derived.lse_offset, config.Q_stages),
        ("dots", derived.dots_offset, config.dO_stages),
    ):
        note = "of each row of Q" if name == "log-sum-exps" else "O·dO of each row"
        add("terms", start, stages * derived.terms_bytes, [name], note)
    add("notes", derived.notes_offset, 2 * config.Q_stages * NOTE_BYTES, ["notes"], "what the producer tells of a step")
    turns = derived.tiles_offset - derived.turns_offset
    if turns:
        add("notes", derived.turns_offset, turns, ["turns"], "who is first and last to add to a block of dQ")
    if derived.announces_tiles:
        add(
            "notes",
            derived.tiles_offset,
            TILE_STAGES * NOTE_BYTES,
            ["tiles"],
            "what is known of this tile and the next",
        )
    add(
        "B", derived.barriers_offset, derived.shared_bytes - derived.barriers_offset, ["barriers"], "pairs: full, empty"
    )
    return SharedMap(tuple(regions), derived.shared_bytes)


# --- Neighbours ------------------------------------------------------------------------------------------------


def neighbours(config: HopperBackwardKernelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each change of one knob worth examining: in words, and as fields for `dataclasses.replace`."""
    yield from doubled_and_halved(config, _SIZES)
    yield from stage_changes(config, MAX_STAGES)
    yield from turned(config, tuple(_SWITCHES))


def warps(config: HopperBackwardKernelConfig) -> tuple[TracedWarp, ...]:
    """The first warp of each consumer warpgroup, and the producer. Scores of a step are computed in the iteration
    before it: the first step's come before the loop."""
    consumers = (
        TracedWarp(4 * index, f"consumer warpgroup {index}", CONSUMER, steps_before_loop=1)
        for index in range(config.n_consumers)
    )
    return (*consumers, TracedWarp(config.n_warps, "producer", PRODUCER, ("COPY",), steps_before_loop=1))


def tiles_around(config: HopperBackwardKernelConfig) -> int:
    """The first block of keys to add to a block of dQ, and the last, do something else than those between them."""
    return int(config.finishes_dQ)


# --- Pictures --------------------------------------------------------------------------------------------------


def banks(config: HopperBackwardKernelConfig) -> CoreMatrices:
    shapes = HopperBackwardShapes(config)
    return CoreMatrices.of_panels("Q", "S = KQᵀ", shapes.Q_offset, config.B_r // shapes.parts)


TIMELINE = TimelineTexts(
    introduction=(
        "The PTX that the first warp of each consumer warpgroup and the producer executed on the simulated GPU, in "
        "order, over two steps in the middle of the loop over queries. A bar above a consumer says which product is "
        "under way: framed while it is being issued and committed, plain until the wait for it. A bar above the "
        "producer says which block has a stage: from the start of its copy until all consumers have read it and the "
        "producer finds the stage empty."
    ),
    caption=(
        "Each mark is a run of consecutive instructions of one kind; the numbers beside the lanes count them. "
        "Positions are counts of a warp's own instructions, not time: pictures of different warps are not on one "
        "clock. They are PTX, in the order the compiler wrote it; the assembler orders machine code its own way."
    ),
    nothing_to_hide_behind="no gradients of scores of its own warpgroup to hide behind",
)

EXPLANATION = Explanation(
    knobs=knobs,
    knobs_to_turn=KNOBS_TO_TURN,
    neighbours=neighbours,
    shapes=shapes,
    register_phases=register_phases,
    shared_map=shared_map,
    register_limit=register_limit,
    reallocations=reallocations,
    warps=warps,
    tiles_around=tiles_around,
    banks=banks,
    products={},
    timeline=TIMELINE,
)
