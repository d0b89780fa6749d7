"""The result of a launch: totals, tables, and counts per instruction and source line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from .counters import Counters, InstructionCounts
from .findings import Finding
from .program import BoundInstruction, Program
from .ptx.syntax import SourceLocation
from .trace import TraceEntry, WarpTrace

_SHOWN_COLUMNS = 80  # of a source line


@dataclass
class LaunchCounters(InstructionCounts):
    """Totals of a launch. ``executed`` counts warp instructions; ``instructions`` splits it by opcode."""

    instructions: dict[str, int] = field(default_factory=dict)
    barriers: int = 0
    mbarrier_phases: int = 0
    mbarrier_blocked: int = 0
    max_async_groups_in_flight: int = 0


@dataclass(frozen=True)
class CountedInstruction:
    """One PTX instruction and what it did."""

    opcode: str
    text: str
    ptx_line: int
    source: SourceLocation | None
    counts: InstructionCounts


class Run:
    """What `Module.launch` returns."""

    def __init__(
        self,
        program: Program,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        counters: Counters,
        trace: WarpTrace | None,
        findings: Sequence[Finding] = (),
        elapsed_s: float = 0.0,
    ) -> None:
        self.kernel = program.name
        self.grid = grid
        self.block = block
        self.shared_bytes = shared_bytes
        self.dynamic_shared_offset = program.dynamic_shared_offset
        """Where dynamic shared memory begins: behind the kernel's own variables."""
        self._code: list[BoundInstruction] = program.code[:-1]  # without the exit appended to every program
        self._counters = counters
        self._trace = trace
        self.findings = list(findings)
        """Hazards that were to be collected, each place once, in the order of their first occurrence."""
        self.elapsed_s = elapsed_s
        """How long the simulation took, on this machine's CPU; a GPU's time is not simulated."""
        self.counters = self._totals(counters)

    def _totals(self, counters: Counters) -> LaunchCounters:
        totals = LaunchCounters()
        counters.add_to(totals)
        for item, executed in zip(self._code, counters.executed, strict=False):
            if executed:
                totals.instructions[item.opcode] = totals.instructions.get(item.opcode, 0) + executed
        totals.barriers = counters.barriers
        totals.mbarrier_phases = counters.mbarrier_phases
        totals.mbarrier_blocked = counters.mbarrier_blocked
        totals.max_async_groups_in_flight = counters.max_async_groups_in_flight
        return totals

    @cached_property
    def _counts(self) -> list[InstructionCounts]:
        return [self._counters.at(pc) for pc in range(len(self._code))]

    @property
    def per_instruction(self) -> list[CountedInstruction]:
        """Every PTX instruction in program order (device functions appear once per call site)."""
        return [
            CountedInstruction(item.opcode, item.text, item.ptx_line, item.source, counts)
            for item, counts in zip(self._code, self._counts, strict=True)
        ]

    def per_source_line(self, outermost: bool = False) -> dict[tuple[str, int], InstructionCounts]:
        """(file, line) → counts. ``outermost`` charges inlined functions to the kernel's line."""
        lines: dict[tuple[str, int], InstructionCounts] = {}
        for item, counts in zip(self._code, self._counts, strict=True):
            if item.source is None:
                continue
            location = item.source.outermost if outermost else item.source
            lines.setdefault((location.file, location.line), InstructionCounts()).add(counts)
        return dict(sorted(lines.items()))

    @property
    def trace(self) -> list[TraceEntry] | None:
        """The instructions of the traced warp in execution order; None unless ``trace_warp`` was given."""
        return None if self._trace is None else self._trace.entries(self._code)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "shared_bytes": self.shared_bytes,
            "findings": [finding.to_dict() for finding in self.findings],
            "counters": {**asdict(self.counters), "bank_conflicts": self.counters.bank_conflicts},
            "per_instruction": [
                {
                    "opcode": item.opcode,
                    "text": item.text,
                    "ptx_line": item.ptx_line,
                    "source": str(item.source) if item.source else None,
                    **_nonzero(item.counts),
                }
                for item in self.per_instruction
            ],
            "per_source_line": [
                {"file": file, "line": line, **_nonzero(counts)}
                for (file, line), counts in self.per_source_line().items()
            ],
        }

    def report(self, source_lines: int = 12) -> str:
        """A table for reading: totals, instructions by opcode, and the source lines with most wavefronts."""
        totals = self.counters
        sections = [
            f"{self.kernel}  grid {self.grid}  block {self.block}  dynamic shared {self.shared_bytes} bytes",
            _table(("counter", "value"), [(name, _number(value)) for name, value in _totals_of(totals)]),
        ]
        by_opcode = sorted(totals.instructions.items(), key=lambda item: -item[1])
        sections.append(_table(("opcode", "warp instructions"), [(name, _number(n)) for name, n in by_opcode]))
        lines = sorted(self.per_source_line().items(), key=lambda item: -item[1].shared_wavefronts)
        rows = [
            (
                f"{file}:{line}",
                _number(c.executed),
                _number(c.shared_wavefronts),
                _number(c.bank_conflicts),
                _number(c.global_sectors),
                _number(c.global_sectors_ideal),
            )
            for (file, line), c in lines[:source_lines]
            if c.shared_wavefronts or c.global_sectors
        ]
        if rows:
            header = ("source line", "executed", "wavefronts", "conflicts", "sectors", "ideal sectors")
            sections.append(_table(header, rows))
        if self.findings:
            sections.append(f"{counted(len(self.findings), 'hazard')}:")
            sections += [str(finding) for finding in self.findings]
        return "\n\n".join(sections)

    def annotated(self, file: str, text: str) -> str:
        """A table of the executed lines of a source file, with their counters and their text.

        ``file`` is its name as in the line information; functions of other files are charged to the line that calls
        them.
        """
        lines: dict[int, InstructionCounts] = {}
        for item, counts in zip(self._code, self._counts, strict=True):
            place = item.source
            while place is not None and place.file != file:
                place = place.inlined_at
            if place is not None:
                lines.setdefault(place.line, InstructionCounts()).add(counts)
        written = text.splitlines()
        rows = [
            (
                str(line),
                _number(counts.executed),
                _number(counts.shared_wavefronts),
                _number(counts.bank_conflicts),
                _number(counts.global_sectors),
                _number(counts.global_sectors_ideal),
                f" {written[line - 1].strip()[:_SHOWN_COLUMNS]}" if line <= len(written) else "",
            )
            for line, counts in sorted(lines.items())
        ]
        header = ("line", "executed", "wavefronts", "conflicts", "sectors", "ideal sectors", f" {file}")
        return _table(header, rows, left=(0, 6))

    def __repr__(self) -> str:
        return f"<Run of {self.kernel}: {self.counters.executed} warp instructions>"


def _nonzero(counts: InstructionCounts) -> dict[str, int]:
    values = {name: value for name, value in asdict(counts).items() if value or name == "executed"}
    if counts.bank_conflicts:
        values["bank_conflicts"] = counts.bank_conflicts
    return values


def _totals_of(totals: LaunchCounters) -> Iterable[tuple[str, int]]:
    for name, value in asdict(totals).items():
        if name == "instructions":
            continue
        yield name, value
        if name == "shared_wavefronts_ideal":
            yield "bank_conflicts", totals.bank_conflicts


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun: "1 hazard", "2 hazards"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _number(value: int) -> str:
    return f"{value:,}"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> str:
    """Columns side by side, numbers to the right; ``left``: the columns that hold text."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: tuple[str, ...]) -> str:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(tuple("-" * width for width in widths)), *(line(row) for row in rows)])
