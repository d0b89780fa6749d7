"""All that is known about one config: plain values, gathered by `gather`, shown by `report`, `page` and the commands.

Nothing here is particular to a kernel family: a family says what its knobs, operands and regions are called.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashwright.compiler.occupancy import Occupancy
from flashwright.kernels.explanation import (
    Buffering,
    Estimate,
    Knob,
    OperandRegisters,
    Reallocation,
    RegisterPhase,
    Shape,
    SharedMap,
)
from flashwright.workbench.explain.loop import InstructionMix
from flashwright.workbench.explain.order import CodeOrder
from flashwright.workbench.quantities import per_thousand
from flashwright.workbench.sample import Sample


@dataclass(frozen=True)
class RegisterBudget:
    """Registers per thread: what the operands need by arithmetic, and what the compiler used."""

    phases: tuple[RegisterPhase, ...]
    limit: int
    used: int
    """By the compiler's count: what every thread is launched with."""
    spill_bytes: int
    stack_bytes: int
    reallocations: tuple[Reallocation, ...] = ()
    """None where threads keep what they were launched with."""

    @property
    def operands(self) -> tuple[OperandRegisters, ...]:
        """Every operand once, in the order of its first use."""
        seen = {operand.operand: operand for phase in self.phases for operand in phase.operands}
        return tuple(seen.values())

    @property
    def planned(self) -> int:
        """The most that is alive at once."""
        return max((phase.total for phase in self.phases), default=0)


@dataclass(frozen=True)
class MeasuredEffect:
    """What a committed result says of a config: its speed beside that of the kernel it is one turn of one knob from."""

    base: str
    base_config: str
    change: str
    rows: int
    times_base: float
    gpu: str
    date: str
    file: str


@dataclass(frozen=True)
class Verdict:
    """What the filter says, and the facts to hold it against."""

    kept: bool
    reason: str | None
    space: str | None = None
    """The smallest search space that has the config; None: no search tries it."""
    measured: tuple[MeasuredEffect, ...] = ()


@dataclass(frozen=True)
class KVLoop:
    ptx: InstructionMix
    sass: InstructionMix | None
    sass_problem: str | None
    """Why there is no machine code to examine."""
    serialised: bool | None = None
    """Whether the assembler made asynchronous products wait for one another; None if they are not asynchronous."""


@dataclass(frozen=True)
class SourceLine:
    """A line of the CUDA source, and the instructions that come from it: those of the functions it calls included."""

    file: str
    number: int
    text: str
    ptx: int
    machine_code: int
    executed: int
    """PTX instructions of the loop that one warp executes in one step."""


@dataclass(frozen=True)
class ListedInstruction:
    place: str
    """Its line in the PTX, or its address in the machine code."""
    text: str
    sources: tuple[int, ...]
    """The source lines it comes from, as indices into `LoopCode.lines`: the innermost first, then where that was
    inlined."""
    executed: int | None = None
    """How often one warp executes it in one step; None of machine code, which the simulator does not execute."""


@dataclass(frozen=True)
class LoopCode:
    """The loop as CUDA source, PTX and machine code; where warps do different things, the loops of all."""

    lines: tuple[SourceLine, ...]
    """Those that instructions come from, file by file, the file of the kernel first."""
    ptx: tuple[ListedInstruction, ...]
    machine_code: tuple[ListedInstruction, ...]
    """None where there is no disassembler."""


@dataclass(frozen=True)
class SharedTraffic:
    """What one warp does to one operand's shared memory in one KV step."""

    operation: str
    operand: str
    accesses: int
    wavefronts: int
    wavefronts_ideal: int

    @property
    def bank_conflicts(self) -> int:
        return self.wavefronts - self.wavefronts_ideal


@dataclass(frozen=True)
class StepCounts:
    """What one warp executes in one KV step that is neither the first nor the last."""

    instructions: int
    scores: int
    """What the warp computes in it."""
    barriers: int
    global_sectors: int
    shared: tuple[SharedTraffic, ...]

    @property
    def bank_conflicts(self) -> int:
        return sum(traffic.bank_conflicts for traffic in self.shared)

    @property
    def wavefronts(self) -> int:
        return sum(traffic.wavefronts for traffic in self.shared)

    @property
    def instructions_per_thousand_scores(self) -> float:
        return per_thousand(self.instructions, self.scores)

    @property
    def conflicts_per_thousand_scores(self) -> float:
        return per_thousand(self.bank_conflicts, self.scores)


@dataclass(frozen=True)
class Simulation:
    """One tile of a head, run on the simulated GPU against random inputs: by one thread block, unless several heads
    were requested or thread blocks work together."""

    q_rows: int
    kv_rows: int
    relative_error: float
    counters: dict[str, int]
    """Totals of the launch."""
    step: StepCounts
    thread_blocks: int = 1


@dataclass(frozen=True)
class LaneAccess:
    lane: int
    address: int
    """Byte offset in shared memory."""
    row: int
    vector: int
    """Which row and which 16-byte vector of the block the lane requested."""

    @property
    def bank_group(self) -> int:
        """Which 16 of a bank line's 128 bytes: four banks."""
        return self.address % 128 // 16


@dataclass(frozen=True)
class MatrixLoad:
    """What one instruction reads of a block as 8×8 matrices, and the layout of the block."""

    config: str
    swizzled: bool
    operand: str
    instruction: str
    source: str
    lanes: tuple[LaneAccess, ...]
    wavefronts: int
    wavefronts_ideal: int
    bank_groups: tuple[tuple[int, ...], ...]
    """Of the first rows of the block, where each 16-byte vector lies."""
    readers: str = "lanes"
    """Who `lanes` are: lanes that each give the address of a row, or the rows themselves where nobody does."""


@dataclass(frozen=True)
class Span:
    """Consecutive executed instructions of one kind."""

    start: int
    length: int
    kind: str
    operand: str | None = None


@dataclass(frozen=True)
class Flight:
    """What goes on while the warp does other things, from its first instruction to the wait for its end: a block's
    copy, or a group of products. Indices of executed instructions."""

    block: str
    region: str
    start: int
    issued: int
    end: int | None
    """None: not waited for before the kernel ends."""
    asynchronous: bool


@dataclass(frozen=True)
class Phase:
    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Two KV steps as one warp executed their PTX. Indices count instructions from the start of the first step."""

    step_starts: tuple[int, ...]
    """And, last, where the second step ends."""
    first_step: int
    spans: tuple[Span, ...]
    flights: tuple[Flight, ...]
    phases: tuple[Phase, ...]
    warp: str = "one warp"
    role: str = "warp"
    """What kind of warp it is, as its family says: `warp` where all do the same, `producer`, `consumer`."""
    steps: str = "KV"
    """What the loop goes over, as in "KV step"."""
    ptx_lines: tuple[int, ...] = ()
    """Of each executed instruction, its line in the PTX."""

    @property
    def instructions(self) -> int:
        return self.step_starts[-1]


@dataclass(frozen=True)
class Effects:
    """The figures by which neighbouring configs are compared."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    instructions_per_step: int | None
    """Of one warp; None if the kernel does not fit the architecture."""
    bank_conflicts_per_step: int | None
    instructions_per_thousand_scores: float | None
    """These two compare between blocks of any size; steps are as long as their blocks are large."""
    conflicts_per_thousand_scores: float | None


@dataclass(frozen=True)
class Neighbour:
    """The same config with one knob turned."""

    change: str
    config: str | None
    problem: str | None
    """Why no kernel can be built from it."""
    rejection: str | None
    effects: Effects | None
    fewer_registers_are_better: bool = True
    """Not where the count is a share of the multiprocessor's that the launch fixes."""
    simulation_problem: str | None = None
    """Why its steps were not counted."""

    @property
    def verdict(self) -> str:
        """What there is to say against it; nothing if there is nothing."""
        if self.problem:
            return f"cannot be built: {self.problem}"
        not_simulated = f"not simulated: {self.simulation_problem}" if self.simulation_problem else ""
        return "; ".join(each for each in (self.rejection, not_simulated) if each)


@dataclass(frozen=True)
class UnbuiltFacts:
    """What is known about a config that the filter rejects and no kernel can be built from."""

    config: str
    family: str
    knobs: tuple[Knob, ...]
    verdict: Verdict
    problem: str
    """Why there is no kernel."""
    operation: str = "forward"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ConfigFacts:
    config: str
    family: str
    arch: str
    sample: Sample
    """What the kernel was compiled for and simulated on, beside the config."""
    kernel: str
    knobs: tuple[Knob, ...]
    shapes: tuple[Shape, ...]
    verdict: Verdict
    estimate: Estimate | None
    """Before compiling; None where the family makes none."""
    registers: RegisterBudget
    shared: SharedMap
    shared_limit_bytes: int
    """The most a thread block may have on this architecture."""
    occupancy: Occupancy
    buffering: tuple[Buffering, ...]
    loop: KVLoop
    orders: tuple[CodeOrder, ...]
    """Of loads and products in the loop: of PTX, then of machine code; none where nothing is loaded by `ldmatrix`."""
    code: LoopCode
    simulation: Simulation | None
    simulation_problem: str | None
    matrix_loads: tuple[MatrixLoad, ...]
    """The config's own, and that of the same block with the swizzle turned; none where none is drawn."""
    timelines: tuple[Timeline, ...]
    """One of each kind of warp, that of the counts first; none if the kernel cannot be simulated."""
    effects: Effects
    neighbours: tuple[Neighbour, ...]
    operation: str = "forward"
    steps: str = "KV"
    """What the kernel's loop goes over, as in "KV step"."""

    @property
    def target(self) -> str:
        """What the kernel is compiled for: the architecture and, where it is not the plainest, the problem."""
        return f"{self.arch}, {self.sample}" if str(self.sample) else self.arch

    @property
    def timeline(self) -> Timeline | None:
        """Of the warp whose steps are counted."""
        return self.timelines[0] if self.timelines else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, with the sums that properties give."""
        document = asdict(self) | {"sample": self.sample.to_dict()}
        document["shared"]["limit_bytes"] = document.pop("shared_limit_bytes")
        document["registers"]["planned"] = self.registers.planned
        for phase, values in zip(self.registers.phases, document["registers"]["phases"], strict=True):
            values["total"] = phase.total
        for found, values in zip(self.orders, document["orders"], strict=True):
            values["order"]["runs"] = [asdict(run) for run in found.order.runs]
        if self.simulation is not None:
            step = self.simulation.step
            document["simulation"]["step"] |= {
                "bank_conflicts": step.bank_conflicts,
                "instructions_per_thousand_scores": step.instructions_per_thousand_scores,
                "conflicts_per_thousand_scores": step.conflicts_per_thousand_scores,
            }
        return document
