"""The KV loop of a compiled kernel, in PTX and in machine code, and the mix of instructions in it.

A loop is found as compilers do: a branch back to an instruction that every path to the branch has passed (a back
edge), with everything that can reach the branch without passing that instruction again. So a block that the
assembler moved out of line still counts where it belongs. Loops are distinguished by what is in them: the KV loop is
the innermost that has products and exponentials, or what else a family names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flashwright.simulator.ptx.parser import parse
from flashwright.simulator.ptx.syntax import (
    Function,
    Instruction,
    Label,
    Operand,
    Register,
    SourceLocation,
    Symbol,
    Vector,
)
from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_ptx, kind_of_sass


@dataclass(frozen=True)
class CodeLine:
    """One instruction of a straight listing, with what control flow and the order of loads and products need."""

    line: int
    opcode: str
    target: int | None = None
    """Index of the instruction it may jump to."""
    falls_through: bool = True
    operands: tuple[tuple[str, ...], ...] = ()
    """The registers that each operand names."""
    text: str = ""
    source: SourceLocation | None = None
    """Of PTX: where it comes from in the CUDA source."""


@dataclass(frozen=True)
class Loop:
    header: CodeLine
    """The first instruction of every iteration."""
    body: tuple[CodeLine, ...]
    """All instructions, in listing order."""


@dataclass(frozen=True)
class InstructionMix:
    """How many instructions of each kind a loop's body holds."""

    total: int
    by_kind: dict[str, int]
    by_opcode: dict[str, int]


def _instruction_mix(loop: Loop, kind_of: Callable[[str], Kind]) -> InstructionMix:
    kinds = Counter(kind_of(line.opcode) for line in loop.body)
    opcodes = Counter(line.opcode for line in loop.body)
    return InstructionMix(
        total=len(loop.body),
        by_kind={kind.value: kinds[kind] for kind in Kind if kinds[kind]},
        by_opcode=dict(sorted(opcodes.items(), key=lambda item: (-item[1], item[0]))),
    )


def ptx_mix(loop: Loop) -> InstructionMix:
    return _instruction_mix(loop, kind_of_ptx)


def sass_mix(loop: Loop) -> InstructionMix:
    return _instruction_mix(loop, kind_of_sass)


# --- Listings --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def ptx_listing(ptx: str, kernel: str) -> tuple[CodeLine, ...]:
    """The instructions of a kernel in PTX. All that is said of one kernel reads it again."""
    function = parse(ptx).functions[kernel]
    instructions, labels = _flatten(function)
    lines = []
    for instruction in instructions:
        target = None
        if instruction.root == "bra" and isinstance(instruction.operands[0], Symbol):
            target = labels[instruction.operands[0].name]
        ends = instruction.root in ("ret", "exit") or target is not None
        falls_through = not ends or instruction.guard is not None
        operands = tuple(_registers_of(operand) for operand in instruction.operands)
        lines.append(
            CodeLine(
                instruction.ptx_line, instruction.opcode, target, falls_through, operands, instruction.text,
                instruction.source,
            )
        )  # fmt: skip
    return tuple(lines)


def _registers_of(operand: Operand) -> tuple[str, ...]:
    if isinstance(operand, Register):
        return (operand.name,)
    if isinstance(operand, Vector):
        return tuple(name for element in operand.elements for name in _registers_of(element))
    return ()


def _flatten(function: Function) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in function.body or ():
        if isinstance(statement, Label):
            labels[statement.name] = len(instructions)
        else:
            instructions.append(statement)
    return instructions, labels


_SASS_LABEL = re.compile(r"^(\.L\S+?):")
_SASS_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?P<guard>@!?U?P[T\d]+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
_SASS_REGISTER = re.compile(r"\bR(?:\d+|Z)\b")
_SASS_TARGET = re.compile(r"`\((\.L\S+?)\)")


def sass_listing(text: str) -> list[CodeLine]:
    """The instructions of a disassembly as `nvdisasm -c` prints it (of a cubin with one kernel)."""
    found: list[tuple[int, re.Match[str]]] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if label := _SASS_LABEL.match(line):
            labels[label[1]] = len(found)
        elif instruction := _SASS_INSTRUCTION.match(line):
            found.append((number, instruction))
    lines = []
    for number, match in found:
        if (match["guard"] or "").strip() == "@!PT":
            lines.append(CodeLine(number, "NOP"))  # a guard that is never true: padding before asynchronous copies
            continue
        opcode, operands = match["opcode"], match["operands"]
        jumps = opcode.startswith("BRA")
        label = _SASS_TARGET.search(operands) if jumps else None
        ends = jumps or opcode.startswith(("EXIT", "RET"))
        # Besides a guard, a branch may name its condition among its operands, or in its own name (`BRA.DIV`).
        conditional = match["guard"] is not None or "." in opcode or re.match(r"\s*!?U?P\d", operands) is not None
        target = labels.get(label[1]) if label else None
        registers = tuple(tuple(_SASS_REGISTER.findall(operand)) for operand in operands.split(","))
        lines.append(CodeLine(number, opcode, target, not ends or conditional, registers))
    return lines


# --- Loops -----------------------------------------------------------------------------------------------------


KV_LOOP = (Kind.MMA, Kind.EXPONENTIAL)
"""What the KV loop has, and no loop inside it."""


def ptx_loop(ptx: str, kernel: str, kinds: Collection[Kind] = KV_LOOP, executed: Collection[int] | None = None) -> Loop:
    """`executed`: lines of what a warp executed, if it is the warp's loop that is looked for."""
    return innermost_loop(ptx_listing(ptx, kernel), kind_of_ptx, kinds, executed)


def sass_loop(disassembly: str, kinds: Collection[Kind] = KV_LOOP) -> Loop:
    return innermost_loop(sass_listing(disassembly), kind_of_sass, kinds)


def innermost_loop(
    lines: Sequence[CodeLine],
    kind_of: Callable[[str], Kind],
    kinds: Collection[Kind],
    executed: Collection[int] | None = None,
) -> Loop:
    """The smallest loop that has instructions of all these kinds, and whose first line was executed; raises
    `ValueError` if there is none."""
    fitting = [
        loop
        for loop in _loops(lines)
        if {kind_of(line.opcode) for line in loop.body} >= set(kinds)
        and (executed is None or loop.header.line in executed)
    ]
    if not fitting:
        names = " and ".join(kind.value for kind in kinds)
        raise ValueError(f"the listing of {len(lines)} instructions has no loop with {names}")
    return min(fitting, key=lambda loop: len(loop.body))


def _loops(lines: Sequence[CodeLine]) -> list[Loop]:
    starts = _block_starts(lines)
    successors = _successors(lines, starts)
    dominators = _dominators(successors)
    blocks_by_header: dict[int, set[int]] = {}
    for block, following in enumerate(successors):
        for header in following:
            if header in dominators[block]:
                blocks_by_header.setdefault(header, set()).update(_natural_loop(successors, block, header))
    return [
        Loop(
            header=lines[starts[header]],
            body=tuple(line for block in sorted(blocks) for line in lines[starts[block] : starts[block + 1]]),
        )
        for header, blocks in blocks_by_header.items()
    ]


def _block_starts(lines: Sequence[CodeLine]) -> list[int]:
    """Where basic blocks begin, and the end of the listing."""
    starts = {0, len(lines)}
    for index, line in enumerate(lines):
        if line.target is not None:
            starts.add(line.target)
        if line.target is not None or not line.falls_through:
            starts.add(index + 1)
    return sorted(starts)


def _successors(lines: Sequence[CodeLine], starts: list[int]) -> list[list[int]]:
    block_at = {start: block for block, start in enumerate(starts)}
    following: list[list[int]] = []
    for end in starts[1:]:
        last = lines[end - 1]
        targets = [] if last.target is None else [last.target]
        if last.falls_through:
            targets.append(end)
        following.append([block_at[target] for target in targets if target < len(lines)])
    return following


def _dominators(successors: list[list[int]]) -> list[set[int]]:
    """Of each block, the blocks that every path from the entry to it passes, itself included."""
    everything = set(range(len(successors)))
    dominators = [everything.copy() for _ in successors]
    dominators[0] = {0}
    predecessors = _reversed(successors)
    changed = True
    while changed:
        changed = False
        for block in range(1, len(successors)):
            new = {block} | _common(dominators[p] for p in predecessors[block]) if predecessors[block] else {block}
            if new != dominators[block]:
                dominators[block] = new
                changed = True
    return dominators


def _common(sets: Iterable[set[int]]) -> set[int]:
    return set.intersection(*sets)


def _reversed(successors: list[list[int]]) -> list[list[int]]:
    predecessors: list[list[int]] = [[] for _ in successors]
    for block, following in enumerate(successors):
        for target in following:
            predecessors[target].append(block)
    return predecessors


def _natural_loop(successors: list[list[int]], tail: int, header: int) -> set[int]:
    """The blocks that reach the back edge's tail without passing its header."""
    predecessors = _reversed(successors)
    body, waiting = {header, tail}, [tail]
    while waiting:
        block = waiting.pop()
        if block == header:
            continue
        for before in predecessors[block]:
            if before not in body:
                body.add(before)
                waiting.append(before)
    return body
