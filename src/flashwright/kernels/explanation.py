"""How a family explains its configs: knobs in words, registers and shared memory by arithmetic, warps to follow.

Plain values and functions of a config; nothing is compiled here. The workbench puts what the compiler, the disassembler
and the simulator find beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from typing import Any

from flashwright.hardware.tensor_map import Swizzle
from flashwright.hardware.units import BANK_LINE_BYTES
from flashwright.kernels.shared_layout import SharedLayout


@dataclass(frozen=True)
class Knob:
    name: str
    value: str
    is_on: bool | None
    """None where the knob is a number."""
    meaning: str
    """What this value does."""


@dataclass(frozen=True)
class Shape:
    name: str
    value: float
    meaning: str


@dataclass(frozen=True)
class OperandRegisters:
    operand: str
    registers: int
    arithmetic: str


@dataclass(frozen=True)
class RegisterPhase:
    """A stretch of a KV step, and the operands that are alive in it."""

    name: str
    operands: tuple[OperandRegisters, ...]

    @property
    def total(self) -> int:
        return sum(operand.registers for operand in self.operands)


@dataclass(frozen=True)
class Estimate:
    """What a kernel will need of an architecture, by arithmetic on its config. The compiler may do better or worse."""

    arch: str
    operands: int
    """Registers of a thread's operands where most are alive."""
    others: int
    """Registers that addresses, counters and temporaries are given on top."""
    limit: int
    """The most that a thread can have."""
    blocks_per_sm: int

    @property
    def registers(self) -> int:
        return min(self.operands + self.others, self.limit)

    @property
    def excess(self) -> int:
        """Registers that are wanted beyond the limit: the compiler may spill."""
        return max(self.operands + self.others - self.limit, 0)

    def __str__(self) -> str:
        spills = f" ({self.excess} more are wanted: it may spill)" if self.excess else ""
        blocks = "1 block" if self.blocks_per_sm == 1 else f"{self.blocks_per_sm} blocks"
        return f"{self.registers} registers{spills}, {blocks} per SM on {self.arch}"


@dataclass(frozen=True)
class Reallocation:
    """Registers that the warps of one part have after launch, by taking others' or giving back their own."""

    part: str
    registers: int
    meaning: str


@dataclass(frozen=True)
class SharedRegion:
    name: str
    operand: str
    offset: int
    bytes: int
    note: str = ""
    is_block: bool = True
    """Rows of a tensor, as against what is known of them."""

    @property
    def end(self) -> int:
        return self.offset + self.bytes


@dataclass(frozen=True)
class SharedMap:
    regions: tuple[SharedRegion, ...]
    total_bytes: int

    def region_at(self, address: int) -> SharedRegion | None:
        return next((region for region in self.regions if region.offset <= address < region.end), None)


@dataclass(frozen=True)
class Buffering:
    """Whether an operand of a matrix product is double-buffered in registers, and why or why not."""

    product: str
    operand: str
    is_double_buffered: bool
    reason: str


WARP, CONSUMER, PRODUCER = "warp", "consumer", "producer"
"""Roles of a warp: all that there is to do; what others copy for it; or copying for others."""


@dataclass(frozen=True)
class TracedWarp:
    """A warp to follow, and what the loop has in it that it spends its KV steps in."""

    number: int
    name: str = "one warp"
    role: str = WARP
    loop_kinds: tuple[str, ...] = ("MMA", "EXPONENTIAL")
    """Names of `Kind`."""
    steps_before_loop: int = 0
    """KV steps outside of the loop, in front of it."""
    steps_ahead: int = 1
    """From the step in which a block's copy starts to the one that computes with it: the last steps start none."""
    last_key_first: bool = False
    """Whether the last keys are visited before those in front of them."""
    steps_before_cut: int = 0
    """KV steps in front of those that an edge of a mask cuts."""
    has_masked_steps: bool = True
    """Whether the loop also has the steps that an edge of a mask cuts; otherwise they are outside of it."""


# --- Pictures that not every kernel has ------------------------------------------------------------------------


@dataclass(frozen=True)
class ExecutedLoads:
    """An operand is loaded from shared memory by `ldmatrix`; the first that was executed is drawn on the banks."""

    operand: str
    rows: int
    columns: int
    """Of a block of the operand."""
    panel_columns: int
    """Columns that lie side by side in shared memory."""
    offset: Callable[[int, int], int]
    """Bytes from the start of a block to the element of a row and a column."""
    is_swizzled: bool


@dataclass(frozen=True)
class CoreMatrices:
    """An operand is read from shared memory by `wgmma`, as core matrices that a descriptor finds."""

    operand: str
    product: str
    """What the operand is summed over its columns in."""
    start: int
    """Byte offset of its first block."""
    rows: int
    row_bytes: int
    """From a row to the next, all of which the swizzle permutes."""
    swizzle: Swizzle

    @classmethod
    def of_panels(cls, operand: str, product: str, start: int, rows: int) -> CoreMatrices:
        """Of a block in panels whose rows are as wide as all banks together."""
        return cls(operand, product, start, rows, BANK_LINE_BYTES, Swizzle.B128)


class Product(Enum):
    """The instruction that multiplies, whose fragments are drawn."""

    MMA = "mma"
    WGMMA = "wgmma"


@dataclass(frozen=True)
class TimelineTexts:
    """What a page says around the timelines."""

    introduction: str = (
        "The PTX that one warp executed on the simulated GPU, in order, over two steps in the middle of the loop. A "
        "bar above says what is under way: framed while it is being started, plain until the wait for it."
    )
    caption: str = (
        "Each mark is a run of consecutive instructions of one kind; the numbers beside the lanes count them. "
        "Positions are counts of instructions, not time. They are PTX, in the order the compiler wrote it; the "
        "assembler orders machine code its own way."
    )
    nothing_to_hide_behind: str = "nothing to hide behind"
    """After "is under way for 12 instructions, with"."""


SWIZZLED = (
    "16-byte vectors are permuted within each bank line, so that eight rows of one column lie in different banks",
    "rows lie one after the other, so that eight rows of one column lie in the same banks and take turns",
)
"""What the knob `swizzled` does, on and off."""


def loads_of_keys(config: Any, layout: SharedLayout, rows: int) -> ExecutedLoads:
    """Of blocks of K with so many rows, laid out so in shared memory."""
    return ExecutedLoads(
        operand="K",
        rows=rows,
        columns=config.d_head,
        panel_columns=layout.panel_columns,
        offset=partial(layout.offset, rows=rows),
        is_swizzled=config.swizzled,
    )


def swizzle_turned(config: Any) -> Any:
    """The same config with the swizzle turned."""
    return replace(config, swizzled=not config.swizzled)


FORWARD_PRODUCTS = {"S": "S = QKᵀ", "O": "O += PV"}


# --- Changes of knobs -------------------------------------------------------------------------------------------


def doubled_and_halved(config: Any, names: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of sizes, in words and as fields. Values that no config may have are found when one is made."""
    for name in names:
        value = getattr(config, name)
        for other in (value // 2, value * 2):
            if other:
                yield f"{name}: {value} → {other}", {name: other}


def turned(config: Any, switches: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in switches:
        value = getattr(config, name)
        yield f"{name}: {'on → off' if value else 'off → on'}", {name: not value}


# --- The whole -------------------------------------------------------------------------------------------------


def plain_knobs(config: Any) -> tuple[Knob, ...]:
    """The fields of a config without a word on what they do."""
    return tuple(_plain_knob(field.name, getattr(config, field.name)) for field in fields(config))


def _plain_knob(name: str, value: Any) -> Knob:
    if isinstance(value, bool):
        return Knob(name, "on" if value else "off", value, "")
    return Knob(name, value.name if isinstance(value, Enum) else str(value), None, "")


@dataclass(frozen=True)
class Explanation:
    """What a family says about its configs. What it leaves out is missing from tables and pages."""

    knobs: Callable[[Any], tuple[Knob, ...]] = plain_knobs
    """Every field of the config, with what its value does."""
    knob_pages: str | None = None
    """The folder of the source tree with a page `NAME.md` on each knob; None: there are none."""
    knobs_to_turn: tuple[str, ...] = ()
    neighbours: Callable[[Any], Iterator[tuple[str, dict[str, Any]]]] = lambda config: iter(())
    """Each change of one knob worth examining: in words, and as fields for `dataclasses.replace`."""
    shapes: Callable[[Any], tuple[Shape, ...]] = lambda config: ()
    """The derived sizes, by the names the kernel uses."""
    register_phases: Callable[[Any], tuple[RegisterPhase, ...]] = lambda config: ()
    """The operands alive in each part of a KV step."""
    estimate: Callable[[Any, str], Estimate | None] = lambda config, arch: None
    """Registers and resident blocks on an architecture, before compiling; None: the family makes no estimate."""
    shared_map: Callable[[Any], SharedMap] | None = None
    """Where the blocks lie, by byte offset; None: only the kernel knows."""
    work_per_step: Callable[[Any], int] = lambda config: config.B_r * config.B_c // config.n_warps
    """Scores that one warp computes in one KV step."""
    register_limit: Callable[[Any], int | None] = lambda config: None
    """The most that a thread which computes can have; None: what the architecture gives to any."""
    reallocations: Callable[[Any], tuple[Reallocation, ...]] = lambda config: ()
    """What warps have after launch, where that changes."""
    assembler_knobs: tuple[str, ...] = ()
    """Switches that change what the assembler makes of the same PTX; machine code is shown with both values."""
    buffering: Callable[[Any], tuple[Buffering, ...]] = lambda config: ()
    """Per operand of the two products, whether it is double-buffered in registers."""
    row_stride: Callable[[Any], int] = lambda config: config.d_head
    """Elements from a row of the simulated tensors to the next."""
    warps: Callable[[Any], tuple[TracedWarp, ...]] = lambda config: (TracedWarp(0),)
    """One of each kind; the first is the one whose instructions are counted."""
    tiles_around: Callable[[Any], int] = lambda config: 0
    """Tiles before the one that is followed, and as many after it, without which its steps would be others."""
    also_drawn: Callable[[Any], tuple[Any, ...]] = lambda config: ()
    """Configs that the pictures set beside a config."""
    banks: Callable[[Any], ExecutedLoads | CoreMatrices | None] = lambda config: None
    """How a block in shared memory is read, which is drawn on the banks; None: it is not drawn."""
    product: Product | None = None
    """Whose fragments are drawn."""
    products: Mapping[str, str] = field(default_factory=lambda: FORWARD_PRODUCTS)
    """What the products are called, by their markers in the source; others are called as they are marked."""
    timeline: TimelineTexts = TimelineTexts()
