"""The order of loads and products in a loop: what the kernel's source asks for, and what the assembler makes of it.

PTX has the order of the source. Machine code has the assembler's, which is what a GPU executes: it moves loads and
products past each other as far as registers, waits and barriers allow.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_ptx, kind_of_sass
from flashwright.workbench.explain.loop import CodeLine, Loop

Registers = Callable[[CodeLine], tuple[str, ...]]


@dataclass(frozen=True)
class CodeRun:
    """Loads, or products, with none of the other kind between them."""

    is_load: bool
    count: int


@dataclass(frozen=True)
class CodeMark:
    """Consecutive instructions that are all loads, or all products."""

    start: int
    length: int
    is_load: bool


@dataclass(frozen=True)
class FirstUse:
    """How far a load is from the first product that reads what it loaded."""

    instructions: int
    products: int
    """Between the two."""


@dataclass(frozen=True)
class LoadOrder:
    """Loads (`ldmatrix`, LDSM) and products (`mma`, HMMA) of a loop's body, in the order of its listing."""

    instructions: int
    """All of the body's."""
    marks: tuple[CodeMark, ...]
    first_uses: tuple[FirstUse, ...]
    """Of every load, in their order."""

    @property
    def runs(self) -> tuple[CodeRun, ...]:
        grouped = groupby(self.marks, key=lambda mark: mark.is_load)
        return tuple(CodeRun(is_load, sum(mark.length for mark in marks)) for is_load, marks in grouped)


@dataclass(frozen=True)
class CodeOrder:
    """The order in one form of a kernel's code."""

    code: str
    """`PTX`, or what the machine code is for: an architecture, and a knob that only the assembler sees."""
    is_machine_code: bool
    order: LoadOrder


@dataclass(frozen=True)
class Spread:
    least: int
    median: int
    most: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        return cls(min(values), round(statistics.median(values)), max(values))


def ptx_order(loop: Loop) -> LoadOrder | None:
    """None where nothing is loaded by `ldmatrix`."""
    return _order(loop, _PTX)


def sass_order(loop: Loop) -> LoadOrder | None:
    return _order(loop, _SASS)


def runs_text(found: CodeOrder, most: int | None = None) -> str:
    """E.g. "8 LDSM, 8 HMMA, 5 × (4 LDSM, 8 HMMA), 4 LDSM, 16 HMMA": pairs that repeat are written once.

    `most` limits how many such parts are written.
    """
    load, product = ("LDSM", "HMMA") if found.is_machine_code else ("ldmatrix", "mma")
    runs = found.order.runs
    described = [f"{run.count} {load if run.is_load else product}" for run in runs]
    pairs = [", ".join(described[index : index + 2]) for index in range(0, len(described), 2)]
    parts = []
    for pair, same in groupby(pairs):
        times = len(list(same))
        parts.append(pair if times == 1 else f"{times} × ({pair})")
    return ", ".join(parts if most is None or len(parts) <= most else [*parts[:most], "…"])


def distances_text(found: CodeOrder) -> str:
    """From a load to the first product that reads it, e.g. "4 (0–14) products and 9 (2–16) instructions"."""
    products = Spread.of([use.products for use in found.order.first_uses])
    instructions = Spread.of([use.instructions for use in found.order.first_uses])
    return (
        f"{products.median} ({products.least}–{products.most}) products and "
        f"{instructions.median} ({instructions.least}–{instructions.most}) instructions"
    )


# --- Reading listings ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Dialect:
    kind_of: Callable[[str], Kind]
    loaded: Registers
    """What a load writes."""
    multiplied: Registers
    """What a product reads, its accumulators apart."""
    moved: Callable[[CodeLine], tuple[str, str] | None]
    """Target and source of a move between registers."""


def _order(loop: Loop, dialect: _Dialect) -> LoadOrder | None:
    kinds = [dialect.kind_of(line.opcode) for line in loop.body]
    if Kind.LOAD not in kinds or Kind.MMA not in kinds:
        return None
    return LoadOrder(len(kinds), tuple(_marks(kinds)), tuple(_first_uses(loop.body, kinds, dialect)))


def _marks(kinds: Sequence[Kind]) -> Iterator[CodeMark]:
    start = 0
    for kind, same in groupby(kinds):
        length = len(list(same))
        if kind in (Kind.LOAD, Kind.MMA):
            yield CodeMark(start, length, kind is Kind.LOAD)
        start += length


def _first_uses(body: Sequence[CodeLine], kinds: Sequence[Kind], dialect: _Dialect) -> Iterator[FirstUse]:
    """The listing is read twice: what is loaded at its end may be multiplied in the next iteration."""
    load_of: dict[str, int] = {}  # by register, the latest load whose value it holds
    loaded_at: dict[int, tuple[int, int]] = {}  # by load, its place and the products before it
    uses: dict[int, FirstUse] = {}
    products = 0
    for place, (line, kind) in enumerate([*zip(body, kinds, strict=True)] * 2):
        if kind is Kind.LOAD and place < len(body):
            loaded_at[place] = (place, products)
            load_of |= dict.fromkeys(dialect.loaded(line), place)
        elif kind is Kind.MMA:
            for load in {load_of[register] for register in dialect.multiplied(line) if register in load_of}:
                started, before = loaded_at[load]
                uses.setdefault(load, FirstUse(place - started, products - before))
            products += 1
        elif (move := dialect.moved(line)) is not None and move[1] in load_of:
            load_of[move[0]] = load_of[move[1]]
    return (uses[load] for load in sorted(uses))


def _ptx_operands(first: int, end: int) -> Registers:
    return lambda line: tuple(register for operand in line.operands[first:end] for register in operand)


def _ptx_move(line: CodeLine) -> tuple[str, str] | None:
    if not line.opcode.startswith("mov") or not all(line.operands[:2]):
        return None
    return line.operands[0][0], line.operands[1][0]


_PTX = _Dialect(kind_of_ptx, _ptx_operands(0, 1), _ptx_operands(1, 3), _ptx_move)

_FRAGMENT_REGISTERS = {"16816": (4, 2), "1688": (2, 1)}
"""Of A and of B, by the shape in an HMMA's name."""


def _sass_range(line: CodeLine, operand: int, count: int) -> tuple[str, ...]:
    """Machine instructions name the first of consecutive registers."""
    named = line.operands[operand]
    if not named or named[0] == "RZ":
        return ()
    first = int(named[0].removeprefix("R"))
    return tuple(f"R{first + index}" for index in range(count))


def _sass_loaded(line: CodeLine) -> tuple[str, ...]:
    matrices = re.search(r"\.([24])$", line.opcode)
    return _sass_range(line, 0, int(matrices[1]) if matrices else 1)


def _sass_multiplied(line: CodeLine) -> tuple[str, ...]:
    of_A, of_B = _FRAGMENT_REGISTERS[line.opcode.split(".")[1]]
    return _sass_range(line, 1, of_A) + _sass_range(line, 2, of_B)


def _sass_move(line: CodeLine) -> tuple[str, str] | None:
    """`MOV R1, R2`, and the same by the multiplier: `IMAD.MOV.U32 R1, RZ, RZ, R2`."""
    source = {"MOV": 1, "IMAD.MOV.U32": 3}.get(line.opcode)
    if source is None or len(line.operands) <= source or not line.operands[0] or not line.operands[source]:
        return None
    return line.operands[0][0], line.operands[source][0]


_SASS = _Dialect(kind_of_sass, _sass_loaded, _sass_multiplied, _sass_move)
