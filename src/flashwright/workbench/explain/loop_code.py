"""The loop's code three times: as CUDA source, as PTX and as machine code, joined by the lines of the source."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from flashwright.compiler.kernel import Kernel
from flashwright.kernels.explanation import TracedWarp
from flashwright.kernels.registry import family_of
from flashwright.simulator.ptx.syntax import SourceLocation
from flashwright.workbench.explain.disassembly import DisassemblyError, disassemble
from flashwright.workbench.explain.execution import Execution
from flashwright.workbench.explain.facts import ListedInstruction, LoopCode, SourceLine
from flashwright.workbench.explain.instruction_kinds import Kind
from flashwright.workbench.explain.loop import ptx_listing, ptx_loop, sass_loop

Place = tuple[str, int]
"""A file of the source, and a line."""
_SOURCE_LINE = re.compile(r'\s*//## File "(?P<file>[^"]+)", line (?P<line>\d+)')
_MACHINE_INSTRUCTION = re.compile(r"\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?P<text>[^;]*\S)\s*;")


def loop_code(kernel: Kernel[Any], executions: Mapping[TracedWarp, Execution | None]) -> LoopCode:
    """The loops of warps of one kernel, with what each executed in a step of its own; nothing if it was not run."""
    source = family_of(kernel.config).source(kernel.config, kernel.variant)
    sources = _Sources({**dict(source.headers), source.file_name: source.text})
    executed: Counter[int] = Counter()
    shown: set[int] = set()
    for execution in filter(None, executions.values()):
        first, end = execution.iterations[execution.steady]
        # Warps that share a loop execute the same of it; those that do not, none of each other's.
        executed |= Counter(entry.ptx_line for entry in execution.trace[first:end])
        shown.update(entry.ptx_line for start, stop in execution.iterations for entry in execution.trace[start:stop])
    kinds = [[Kind[name] for name in warp.loop_kinds] for warp in executions]
    for of_warp in kinds:
        shown.update(line.line for line in ptx_loop(kernel.ptx, kernel.name, of_warp).body)
    ptx = [
        ListedInstruction(str(each.line), each.text, sources.of(each.source), executed[each.line])
        for each in ptx_listing(kernel.ptx, kernel.name)
        if each.line in shown
    ]
    return sources.ordered(ptx, list(_machine_code(kernel, kinds, sources)))


def _machine_code(
    kernel: Kernel[Any], kinds: Collection[Collection[Kind]], sources: _Sources
) -> Iterator[ListedInstruction]:
    try:
        listing = disassemble(kernel.cubin, with_source_lines=True)
        shown = {line.line for of_warp in kinds for line in sass_loop(listing, of_warp).body}
    except (DisassemblyError, ValueError):  # the facts about the loop quote it
        return
    places: list[Place] = []
    follows_instruction = True
    for number, line in enumerate(listing.splitlines(), start=1):
        if named := _SOURCE_LINE.match(line):
            # A line and those that it was inlined at stand one under the other, the innermost first.
            places = [] if follows_instruction else places
            places.append((named["file"], int(named["line"])))
        elif number in shown and (instruction := _MACHINE_INSTRUCTION.match(line)):
            yield ListedInstruction(instruction["address"], instruction["text"], sources.indices(places))
        follows_instruction = named is None


class _Sources:
    """The lines that instructions come from, numbered as they are met."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = {name: text.splitlines() for name, text in texts.items()}
        self._indices: dict[Place, int] = {}
        self._names: dict[str, str | None] = {}

    def of(self, place: SourceLocation | None) -> tuple[int, ...]:
        places = []
        while place is not None:
            places.append((place.file, place.line))
            place = place.inlined_at
        return self.indices(places)

    def indices(self, places: Collection[Place]) -> tuple[int, ...]:
        """Of a line and of those that it was inlined at; of files of the source alone."""
        # The line information of machine code has places that do not exist: line 154 of a file of 19.
        known = [(name, line) for file, line in places if (name := self._name(file)) and self._has(name, line)]
        return tuple(dict.fromkeys(self._indices.setdefault(place, len(self._indices)) for place in known))

    def _has(self, name: str, line: int) -> bool:
        return 0 < line <= len(self._texts[name])

    def _name(self, file: str) -> str | None:
        """The name that the source has for a file; the compiler writes the working directory before it."""
        if file not in self._names:
            matching = (name for name in self._texts if file == name or file.endswith(f"/{name}"))
            self._names[file] = max(matching, key=len, default=None)
        return self._names[file]

    def ordered(self, ptx: list[ListedInstruction], machine_code: list[ListedInstruction]) -> LoopCode:
        """Lines file by file; the file from which most comes, that of the kernel, first."""
        in_ptx = _sums(ptx, lambda each: 1)
        in_machine_code = _sums(machine_code, lambda each: 1)
        executed = _sums(ptx, lambda each: each.executed or 0)
        most: Counter[str] = Counter()
        for (file, _), index in self._indices.items():
            most[file] = max(most[file], in_ptx[index])
        order = sorted(self._indices, key=lambda place: (-most[place[0]], place))
        position = {self._indices[place]: number for number, place in enumerate(order)}
        lines = [
            SourceLine(file, line, self._texts[file][line - 1], in_ptx[index], in_machine_code[index], executed[index])
            for file, line in order
            for index in [self._indices[file, line]]
        ]

        def moved(each: ListedInstruction) -> ListedInstruction:
            return ListedInstruction(each.place, each.text, tuple(position[i] for i in each.sources), each.executed)

        return LoopCode(tuple(lines), tuple(map(moved, ptx)), tuple(map(moved, machine_code)))


def _sums(instructions: list[ListedInstruction], weight: Callable[[ListedInstruction], int]) -> Counter[int]:
    """By source line: all instructions that come from it."""
    sums: Counter[int] = Counter()
    for each in instructions:
        for index in each.sources:
            sums[index] += weight(each)
    return sums
