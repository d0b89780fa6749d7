"""What the Hopper family's config means: its knobs in words, its operands' registers, its shared memory.

Arithmetic on the config alone; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from flashwright.kernels.explanation import (
    CONSUMER,
    PRODUCER,
    Buffering,
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
    TimelineTexts,
    TracedWarp,
)
from flashwright.kernels.forward.hopper.config import (
    MAX_CONSUMERS,
    MAX_PRODUCT_COLUMNS,
    WARPGROUP_ROWS,
    WARPS_PER_WARPGROUP,
    HopperForwardKernelConfig,
)
from flashwright.kernels.forward.hopper.shapes import (
    BARRIER_PAIR_BYTES,
    KEYS_WITH_CARE,
    PANEL_COLUMNS,
    TILE_BYTES,
    TILE_STAGES,
    WARPGROUP_THREADS,
    HopperTileShapes,
    blocks_with_care,
)

KEYS_STEP = 32
"""By which B_c is tried larger and smaller."""

_SWITCHES: dict[str, tuple[str, str]] = {
    "overlaps_softmax": (
        "a step's S = QKᵀ and the step before's O += PV are issued together, and softmax runs while O's product does",
        "each product is waited for as soon as it is issued; while softmax runs, the warpgroup's products rest",
    ),
    "ping_pong": (
        "consumer warpgroups take turns at issuing products, so that one's run during another's softmax",
        "consumer warpgroups issue products when they come to them, perhaps all at once",
    ),
    "persistent": (
        "as many thread blocks as multiprocessors, each with many tiles; the next tile's Q, K and V are copied "
        "while this one ends",
        "one thread block per tile of Q; each starts with nothing in shared memory",
    ),
    "lazy_rescale": (
        "O is rescaled only when a row's maximum has grown by more than a factor of 2⁴⁰ in the exponential (2¹⁵ in "
        "FP16), or a key dominates the row; only then do lanes exchange maxima",
        "lanes exchange maxima and O is rescaled in every step",
    ),
    "guesses_maxima": (
        f"after the first {KEYS_WITH_CARE} keys that a row visits, steps without a mask take exponentials relative to "
        "the reference found there, and search for no maximum; if their sums are large, the reference is lifted by a "
        "power of two; if they overflow, the warpgroup computes the scores again, and searches in the rest of its tile",
        "every step searches for its largest scores before it takes exponentials",
    ),
    "first_block_leads": (
        "the first block of keys is visited before the others, which follow from the last to the second: references "
        "come from both ends of a row, and scores that fall along the keys overflow them as little as those that rise. "
        "With a left edge of a window: no block leads",
        "blocks of keys are visited from the last to the first; where maxima are guessed, scores that fall fast along "
        "the keys overflow a reference from a row's end, and the rest of the tile searches",
    ),
}
_SIZES = ("B_r", "B_c", "kv_stages")
KNOBS_TO_TURN: tuple[str, ...] = (*_SIZES, *_SWITCHES)
"""All but `dtype` and `d_head`, which say what is computed, not how."""


def knobs(config: HopperForwardKernelConfig) -> tuple[Knob, ...]:
    """Every field of the config, with what its value does."""
    return tuple(_knob(config, field.name) for field in fields(config))


def _knob(config: HopperForwardKernelConfig, name: str) -> Knob:
    value = getattr(config, name)
    if name in _SWITCHES:
        return Knob(name, "on" if value else "off", value, _SWITCHES[name][0 if value else 1])
    warpgroups = "1 consumer warpgroup" if config.n_consumers == 1 else f"{config.n_consumers} consumer warpgroups"
    meanings = {
        "dtype": "element type of Q, K, V and O; softmax and sums are fp32",
        "d_head": "columns of Q, K, V and O",
        "B_r": f"rows of Q and O per tile: {warpgroups} of {WARPGROUP_ROWS}; one more warpgroup copies and schedules",
        "B_c": "rows of K and V per step of the loop, and columns of S in one wgmma",
        "kv_stages": "K and V blocks in shared memory: the producer may be so far ahead"
        if value > 1
        else "one K and one V block in shared memory: the next is copied when all have read this one",
    }
    return Knob(name, value.name if name == "dtype" else str(value), None, meanings[name])


def shapes(config: HopperForwardKernelConfig) -> tuple[Shape, ...]:
    """The derived sizes, by the names the kernel uses."""
    derived = HopperTileShapes(config)
    return (
        Shape(
            "threads", derived.threads, "threads per block: the consumers', and a warpgroup's that copies and schedules"
        ),
        Shape("n_consumers", config.n_consumers, f"warpgroups that compute {WARPGROUP_ROWS} rows each"),
        Shape("panels", derived.panels, f"stretches of {PANEL_COLUMNS} columns in which a tile lies in shared memory"),
        Shape("QK_k_steps", config.d_head // 16, f"wgmma of m64n{config.B_c}k16 in S = QKᵀ, 16 columns deep each"),
        Shape("PV_k_steps", config.B_c // 16, f"wgmma of m64n{config.d_head}k16 in O += PV, 16 keys deep each"),
        Shape("Q_stages", derived.Q_stages, _Q_stages_meaning(derived)),
        Shape("Q_bytes", derived.Q_bytes, "of one consumer warpgroup's rows of Q in shared memory"),
        Shape("KV_bytes", derived.KV_bytes, "of one K or V block: what its barrier counts until it is full"),
        Shape("consumer_registers", derived.consumer_registers, "per consumer thread, after setmaxnreg.inc"),
        Shape("producer_registers", derived.producer_registers, "per producer thread, after setmaxnreg.dec"),
    )


def _Q_stages_meaning(derived: HopperTileShapes) -> str:
    if derived.Q_stages == 1:
        return "slot of Q for each consumer: the next tile's rows come when this one's have been read"
    return "slots of Q for each consumer: the next tile's rows come while this one's are read"


# --- Registers -------------------------------------------------------------------------------------------------


def register_phases(config: HopperForwardKernelConfig) -> tuple[RegisterPhase, ...]:
    """The operands alive in each part of a KV step, per consumer thread. Addresses and temporaries come on top."""
    derived = HopperTileShapes(config)
    O = _accumulator("O accumulator", config.d_head, derived.O_registers)  # noqa: E741
    S = _accumulator("S accumulator", config.B_c, derived.S_registers)
    P = OperandRegisters(
        "P operand", derived.S_registers // 2, f"{WARPGROUP_ROWS} × {config.B_c} at 16 bits ÷ {WARPGROUP_THREADS}"
    )
    if config.guesses_maxima:
        row_state = OperandRegisters("row state", 8, "2 rows × (reference + sum + its rounding + O's factor)")
        # Added to the sums only if no exponential overflowed.
        guess: tuple[OperandRegisters, ...] = (OperandRegisters("guessed sums", 2, "2 rows"),)
    else:
        row_state, guess = OperandRegisters("row max and sum", 4, "2 rows × (maximum + sum)"), ()
    if config.overlaps_softmax:
        return (
            RegisterPhase("S, O issued", (O, S, P, row_state)),
            RegisterPhase("softmax", (O, S, P, row_state, *guess)),  # the product O += PV is still reading P
            RegisterPhase("S → P", (O, S, row_state)),
        )
    return (
        RegisterPhase("S = QKᵀ", (O, S, row_state)),
        RegisterPhase("softmax", (O, S, row_state)),
        RegisterPhase("O += PV", (O, P, row_state)),
    )


def _accumulator(name: str, columns: int, registers: int) -> OperandRegisters:
    return OperandRegisters(name, registers, f"{WARPGROUP_ROWS} × {columns} in fp32 ÷ {WARPGROUP_THREADS} threads")


def register_limit(config: HopperForwardKernelConfig) -> int | None:
    return HopperTileShapes(config).consumer_registers


def reallocations(config: HopperForwardKernelConfig) -> tuple[Reallocation, ...]:
    derived = HopperTileShapes(config)
    return (
        Reallocation("consumer", derived.consumer_registers, "setmaxnreg.inc takes what the producer gave back"),
        Reallocation("producer", derived.producer_registers, "setmaxnreg.dec gives the others back"),
    )


# --- Shared memory ---------------------------------------------------------------------------------------------


def shared_map(config: HopperForwardKernelConfig) -> SharedMap:
    """Where the tiles, their barriers and the announcements of tiles lie, by byte offset."""
    derived = HopperTileShapes(config)
    regions = []
    for slot in range(derived.Q_stages):
        for warpgroup in range(config.n_consumers):
            name = f"Q {warpgroup}, slot {slot}" if derived.Q_stages > 1 else f"Q {warpgroup}"
            offset = (slot * config.n_consumers + warpgroup) * derived.Q_bytes
            regions.append(SharedRegion(name, "Q", offset, derived.Q_bytes, f"consumer {warpgroup}"))
    for operand, start in (("K", derived.K_offset), ("V", derived.V_offset)):
        for stage in range(config.kv_stages):
            offset = start + stage * derived.KV_bytes
            regions.append(SharedRegion(region_name(config, operand, stage), operand, offset, derived.KV_bytes))
    pairs = derived.Q_stages * config.n_consumers + 2 * config.kv_stages + TILE_STAGES
    small = pairs * BARRIER_PAIR_BYTES + TILE_STAGES * TILE_BYTES
    note = f"{pairs} pairs: full, empty; {TILE_STAGES} tiles that come next"
    regions.append(SharedRegion("barriers, tiles", "B", derived.Q_barriers_offset, small, note))
    return SharedMap(tuple(regions), derived.shared_bytes)


def region_name(config: HopperForwardKernelConfig, operand: str, block: int) -> str:
    """Where the block of that number is put: the stages are a ring."""
    return f"{operand}, stage {block % config.kv_stages}" if config.kv_stages > 1 else operand


# --- Buffering -------------------------------------------------------------------------------------------------


def buffering(config: HopperForwardKernelConfig) -> tuple[Buffering, ...]:
    """Per operand of the two products, whether it has two places in registers: only P is ever there."""
    blocks = "one block is" if config.kv_stages == 1 else f"{config.kv_stages} blocks are"
    from_ring = f"wgmma reads it from shared memory, where {blocks} kept (kv_stages = {config.kv_stages})"
    Q = "wgmma reads it from shared memory, where it stays for the whole tile"
    if HopperTileShapes(config).Q_stages > 1:
        Q += "; the next tile's has a slot of its own"
    P = (
        "overlaps_softmax is on: P has registers beside S, for the next S is computed while P is multiplied"
        if config.overlaps_softmax
        else "overlaps_softmax is off: P takes the place of S, which is dead by then"
    )
    return (
        Buffering("S = QKᵀ", "Q", False, Q),
        Buffering("S = QKᵀ", "K", False, from_ring),
        Buffering("O += PV", "P", config.overlaps_softmax, P),
        Buffering("O += PV", "V", False, from_ring),
    )


# --- Neighbours ------------------------------------------------------------------------------------------------


def neighbours(config: HopperForwardKernelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each change of one knob worth examining: in words, and as fields for `dataclasses.replace`."""
    steps = {
        "B_r": (WARPGROUP_ROWS, MAX_CONSUMERS * WARPGROUP_ROWS),
        "B_c": (KEYS_STEP, MAX_PRODUCT_COLUMNS),
        "kv_stages": (1, 4),
    }
    for name, (step, most) in steps.items():
        value = getattr(config, name)
        for other in (value - step, value + step):
            if 0 < other <= most:
                yield f"{name}: {value} → {other}", {name: other}
    for name in _SWITCHES:
        value = getattr(config, name)
        yield f"{name}: {'on → off' if value else 'off → on'}", {name: not value}


def work_per_step(config: HopperForwardKernelConfig) -> int:
    """Scores that one warp computes in one KV step."""
    return WARPGROUP_ROWS // WARPS_PER_WARPGROUP * config.B_c


def warps(config: HopperForwardKernelConfig) -> tuple[TracedWarp, ...]:
    """The first warp of each consumer warpgroup, and the producer. The first step has nothing to rescale, and with
    overlap no product to overlap with. A kernel that guesses has a loop of steps with care too, in front of the one
    that votes."""
    loop_kinds: tuple[str, ...] = ("MMA", "EXPONENTIAL")
    leads = config.first_block_leads
    steps_before_loop = 1
    if config.guesses_maxima:
        loop_kinds, steps_before_loop = (*loop_kinds, "VOTE"), leads + blocks_with_care(config.B_c, first_leads=leads)
    consumers = (
        TracedWarp(
            WARPS_PER_WARPGROUP * index,
            f"consumer warpgroup {index}",
            CONSUMER,
            loop_kinds,
            steps_before_loop,
            last_key_first=True,
            steps_before_cut=int(leads),
            has_masked_steps=False,
        )
        for index in range(config.n_consumers)
    )
    producer = TracedWarp(
        config.n_warps, "producer", PRODUCER, ("COPY",), steps_before_loop=1, last_key_first=True,
        steps_before_cut=int(leads),
    )  # fmt: skip
    return (*consumers, producer)


# --- Pictures --------------------------------------------------------------------------------------------------


def banks(config: HopperForwardKernelConfig) -> CoreMatrices:
    return CoreMatrices.of_panels("K", "S = QKᵀ", HopperTileShapes(config).K_offset, config.B_c)


TIMELINE = TimelineTexts(
    introduction=(
        "The PTX that the first warp of each consumer warpgroup and the producer executed on the simulated GPU, in "
        "order, over two steps in the middle of the loop. A bar above a consumer says which product is under way: "
        "framed while it is being issued and committed, plain until the wait for it. A bar above the producer says "
        "which block has a stage: from the start of its copy until all consumers have read it and the producer finds "
        "the stage empty."
    ),
    caption=(
        "Each mark is a run of consecutive instructions of one kind; the numbers beside the lanes count them. "
        "Positions are counts of a warp's own instructions, not time: pictures of different warps are not on one "
        "clock. They are PTX, in the order the compiler wrote it; the assembler orders machine code its own way."
    ),
    nothing_to_hide_behind="no softmax of its own warpgroup to hide behind",
)

EXPLANATION = Explanation(
    knobs=knobs,
    knob_pages="docs/hopper_knobs",
    knobs_to_turn=KNOBS_TO_TURN,
    neighbours=neighbours,
    shapes=shapes,
    register_phases=register_phases,
    shared_map=shared_map,
    work_per_step=work_per_step,
    register_limit=register_limit,
    reallocations=reallocations,
    buffering=buffering,
    warps=warps,
    banks=banks,
    product=Product.WGMMA,
    timeline=TIMELINE,
)
