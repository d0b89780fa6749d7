"""What the Ampere family's config means: its knobs in words, its operands' registers, its shared memory.

Arithmetic on the config alone; nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from flashwright.hardware.units import FRAGMENT
from flashwright.kernels.explanation import (
    SWIZZLED,
    Buffering,
    ExecutedLoads,
    Explanation,
    Knob,
    Product,
    Shape,
    SharedMap,
    SharedRegion,
    TimelineTexts,
    TracedWarp,
    loads_of_keys,
    swizzle_turned,
)
from flashwright.kernels.forward.ampere.config import MAX_WARPS, FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.registers import estimate, register_phases
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes, GemmShape

TYPICAL_HEADS = 16
"""Heads of the tensors for which a static row stride is tried."""

USUAL_RING = 3
"""Stages of a ring that is tried: a step's copies start a step ahead, into a stage that was left a step ago."""

_SWITCHES: dict[str, tuple[str, str]] = {
    "async_copy": (
        "blocks go from global to shared memory by cp.async, past the registers; the warp goes on meanwhile",
        "blocks pass through registers on their way to shared memory, and the warp waits for them",
    ),
    "eager_load_blocks": (
        "V's copy starts before S = QKᵀ and the next K's before softmax, so that they arrive during the arithmetic",
        "each block is copied when it is needed, and everybody waits for it",
    ),
    "swizzled": SWIZZLED,
    "mma_double_buffer_loads": (
        "streamed operands have two register buffers: tile t+1 is loaded while tile t is multiplied",
        "streamed operands have one register buffer: each tile is loaded, then multiplied",
    ),
    "optimized_softmax": (
        "exponentials are exp2, with log2(e) and the scale folded into one multiply-add per score",
        "scores are scaled first, and exp is a sequence of about eight instructions",
    ),
    "peeled_first_step": (
        "the first KV block runs outside of the loop and rescales nothing, for O is still empty",
        "the first KV block runs in the loop and rescales an O that is zero",
    ),
    "reversed_kv": ("KV blocks are visited from the last to the first", "KV blocks are visited from first to last"),
    "streaming_stores": (
        "O is stored with the evict-first policy, for the kernel never reads it again",
        "O is stored with the usual cache policy",
    ),
    "mma_row_sum": (
        "the tensor cores sum the exponentials, as P times a matrix of ones",
        "the exponentials are summed by fp32 additions",
    ),
    "assembler_reorders": (
        "assembled at -O3: load tiles and double buffering hardly change how loads and products are mixed",
        "assembled at -O1: loads and products are mixed too, by other rules, and keep_order alone prevents that",
    ),
    "two_kv_stages": (
        "two K and two V blocks in shared memory: the next step's are copied during this one, with one barrier a step",
        "one K and one V block in shared memory, with two barriers a step",
    ),
    "lazy_rescale": (
        "O is rescaled only when a row's maximum has grown by more than a factor of 2⁴⁰ in the exponential (2¹⁵ in "
        "FP16), or, without mma_row_sum, a key dominates the row",
        "O is rescaled in every step",
    ),
    "keep_order": (
        "between loads and products stands an instruction (pmevent) that the assembler moves nothing across: machine "
        "code has the kernel's order",
        "the assembler may move loads and products past each other",
    ),
}
_THROUGH_REGISTERS = {
    "eager_load_blocks": "V is copied before S = QKᵀ and the next K before softmax, but async_copy is off: "
    "the warp waits for each copy, and nothing arrives during the arithmetic",
    "two_kv_stages": "two K and two V blocks in shared memory, with one barrier a step; but async_copy is off: "
    "the warp waits for the next step's copies before it computes this one",
}
"""What switches that start copies early do where copies are not asynchronous."""
_SIZES = ("B_r", "B_c", "n_warps")
_TILES = {"Q_mma_load_K_tiles": "Q", "K_mma_load_K_tiles": "K", "V_mma_load_K_tiles": "V"}
KNOBS_TO_TURN: tuple[str, ...] = (*_SIZES, *_TILES, *_SWITCHES, "static_row_stride", "ring_stages")
"""All but `dtype` and `d_head`, which say what is computed, not how."""


def knobs(config: FlashForwardKernelConfig) -> tuple[Knob, ...]:
    """Every field of the config, with what its value does."""
    return tuple(_knob(config, field.name) for field in fields(config))


def _knob(config: FlashForwardKernelConfig, name: str) -> Knob:
    value = getattr(config, name)
    if value and not config.async_copy and name in _THROUGH_REGISTERS:
        return Knob(name, "on", True, _THROUGH_REGISTERS[name])
    if name in _SWITCHES:
        return Knob(name, "on" if value else "off", value, _SWITCHES[name][0 if value else 1])
    if name in _TILES:
        operand = _TILES[name]
        whole = f"the whole block of {operand} is loaded into registers at once"
        lines = "rows" if operand == "V" else "columns"
        part = f"{operand} is streamed into registers {value} fragments ({value * FRAGMENT} {lines}) at a time"
        return Knob(name, str(value), None, part if value else whole)
    meanings = {
        "dtype": "element type of Q, K, V and O; softmax and sums are fp32",
        "d_head": "columns of Q, K, V and O",
        "B_r": "rows of Q and O per thread block",
        "B_c": "rows of K and V per step of the loop",
        "n_warps": f"warps per thread block, {config.B_r / config.n_warps:g} rows of Q each",
        "static_row_stride": "elements from a row to the next are known when compiling"
        if value
        else "the distance between rows is read at run time",
        "ring_stages": f"K and V have {value} stages with barriers of their own: warps wait for copies, not for all"
        if value
        else "barriers of the thread block guard K and V",
    }
    return Knob(name, value.name if name == "dtype" else str(value), None, meanings[name])


def shapes(config: FlashForwardKernelConfig) -> tuple[Shape, ...]:
    """The derived sizes, by the names the kernel uses."""
    derived = ForwardKernelTileShapes(config)
    meanings = {
        "threads": "threads per block",
        "d_head_fragments": "8-wide fragments across a row",
        "QO_rows_per_warp": "rows of Q and O that one warp owns",
        "QO_fragments_per_warp": "the same in fragments of 8",
        "KV_calc_fragments": "fragments of a K/V block; every warp multiplies with all of them",
        "KV_ldst_fragments_per_warp": "a warp's share of copying a K/V block, rounded up to whole fragments",
        "QK_rmem_tile_fragments": "fragments along d_head in one register tile of S = QKᵀ",
        "QK_rmem_tiles": "such tiles",
        "PV_rmem_tile_fragments": "fragments along B_c in one register tile of O += PV",
        "PV_rmem_tiles": "such tiles",
        "Q_rmem_tile_buffers": "register tiles of Q held at once",
        "K_rmem_tile_buffers": "register tiles of K held at once",
        "V_rmem_tile_buffers": "register tiles of V held at once",
        "KV_stages": "K/V blocks in shared memory",
    }
    return tuple(Shape(name, getattr(derived, name), meaning) for name, meaning in meanings.items())


# --- Shared memory ---------------------------------------------------------------------------------------------


def shared_map(config: FlashForwardKernelConfig) -> SharedMap:
    """Where the blocks lie, by byte offset."""
    derived = ForwardKernelTileShapes(config)
    regions = [SharedRegion("Q", "Q", 0, derived.Q_shared_bytes, "O takes its place at the end")]
    for stage in range(derived.KV_stages):
        suffix = f", stage {stage}" if derived.KV_stages > 1 else ""
        note = _steps_of_stage(stage, derived.KV_stages)
        base = stage * derived.KV_stage_bytes
        size = derived.KV_shared_bytes
        regions.append(SharedRegion(f"K{suffix}", "K", base + derived.K_shared_offset, size, note))
        regions.append(SharedRegion(f"V{suffix}", "V", base + derived.V_shared_offset, size, note))
    if config.ring_stages:
        start = derived.ring_barriers_offset
        size = derived.shared_bytes - start
        regions.append(SharedRegion("barriers", "B", start, size, "two a stage", is_block=False))
    return SharedMap(tuple(regions), derived.shared_bytes)


def _steps_of_stage(stage: int, stages: int) -> str:
    if stages == 1:
        return "every step"
    return ("even steps", "odd steps")[stage] if stages == 2 else f"steps {stage}, {stage + stages}, …"


# --- Double buffering ------------------------------------------------------------------------------------------


def buffering(config: FlashForwardKernelConfig) -> tuple[Buffering, ...]:
    """Per operand of the two products, whether its register tiles are double-buffered."""
    derived = ForwardKernelTileShapes(config)
    QK, PV = derived.QK, derived.PV
    return (
        Buffering("S = QKᵀ", "Q", QK.DoubleBufferA, _why(config, "Q", QK.A_load_entire_block_into_rf, QK)),
        Buffering("S = QKᵀ", "K", QK.DoubleBufferB, _why(config, "K", QK.B_load_entire_block_into_rf, QK)),
        Buffering("O += PV", "P", PV.DoubleBufferA, "P is computed in registers and never loaded"),
        Buffering("O += PV", "V", PV.DoubleBufferB, _why(config, "V", PV.B_load_entire_block_into_rf, PV)),
    )


def _why(config: FlashForwardKernelConfig, operand: str, whole_block: bool, gemm: GemmShape) -> str:
    flag = config.mma_double_buffer_loads
    if whole_block:
        loaded = "once, before the loop," if operand == "Q" else "before the product"
        effect = "; mma_double_buffer_loads has no effect on it" if flag else ""
        return f"{operand}_mma_load_K_tiles = 0: the whole block is loaded {loaded} and no next tile is left{effect}"
    order = "" if config.keep_order else "; in PTX: without keep_order, the assembler orders them its own way"
    if not flag:
        return f"mma_double_buffer_loads is off: each of {gemm.tiles} tiles is loaded, then multiplied{order}"
    return f"two buffers: tile t+1 of {gemm.tiles} is loaded while tile t is multiplied{order}"


# --- Neighbours ------------------------------------------------------------------------------------------------


def neighbours(config: FlashForwardKernelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each change of one knob worth examining: in words, and as fields for `dataclasses.replace`."""
    for name in _SIZES:
        value = getattr(config, name)
        most = MAX_WARPS if name == "n_warps" else 256
        for other in (value // 2, value * 2):
            if value > other > 0 or value < other <= most:
                yield _change(name, value, other)
    for name in _TILES:
        value = getattr(config, name)
        for other in (2,) if value == 0 else (value // 2 if value > 2 else 0, value * 2):
            yield _change(name, value, other)
    for name in _SWITCHES:
        value = getattr(config, name)
        yield f"{name}: {'on → off' if value else 'off → on'}", {name: not value}
    stride = config.static_row_stride
    yield _change("static_row_stride", stride, 0 if stride else TYPICAL_HEADS * config.d_head)
    yield _change("ring_stages", config.ring_stages, 0 if config.ring_stages else USUAL_RING)


def _change(name: str, old: int, new: int) -> tuple[str, dict[str, Any]]:
    return f"{name}: {old} → {new}", {name: new}


def work_per_step(config: FlashForwardKernelConfig) -> int:
    """Scores that one warp computes in one KV step."""
    return config.B_r // config.n_warps * config.B_c


def warps(config: FlashForwardKernelConfig) -> tuple[TracedWarp, ...]:
    """The first one; all do the same."""
    return (TracedWarp(0, steps_before_loop=int(config.peeled_first_step), last_key_first=config.reversed_kv),)


def row_stride(config: FlashForwardKernelConfig) -> int:
    """A kernel that was compiled for a stride is given it."""
    return config.static_row_stride or config.d_head


# --- Pictures --------------------------------------------------------------------------------------------------


def banks(config: FlashForwardKernelConfig) -> ExecutedLoads:
    return loads_of_keys(config, ForwardKernelTileShapes(config).shared_layout, config.B_c)


TIMELINE = TimelineTexts(
    introduction=(
        "The PTX that one warp executed on the simulated GPU, in order, over two steps in the middle of the loop. "
        "A bar above says which block is on its way: framed while its copy is being started, plain until the wait "
        "that makes it arrive."
    ),
    caption=(
        "Each mark is a run of consecutive instructions of one kind; the numbers beside the lanes count them. "
        "Positions are counts of instructions, not time. They are PTX, in the order the compiler wrote it. "
        "The order of loads and products in machine code, which a GPU executes, is below."
    ),
    nothing_to_hide_behind="nothing to hide behind: the warp waits for it at once",
)

EXPLANATION = Explanation(
    knobs=knobs,
    knob_pages="docs/knobs",
    knobs_to_turn=KNOBS_TO_TURN,
    neighbours=neighbours,
    shapes=shapes,
    register_phases=register_phases,
    estimate=estimate,
    shared_map=shared_map,
    work_per_step=work_per_step,
    assembler_knobs=("assembler_reorders",),
    buffering=buffering,
    warps=warps,
    row_stride=row_stride,
    also_drawn=lambda config: (swizzle_turned(config),),
    banks=banks,
    product=Product.MMA,
    timeline=TIMELINE,
)
