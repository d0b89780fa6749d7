"""Two KV steps of one warp: a lane per kind of instruction, and above them the copies or products under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from flashwright.kernels.explanation import CONSUMER, PRODUCER, WARP
from flashwright.workbench.explain.facts import Flight, Phase, Span, Timeline
from flashwright.workbench.explain.instruction_kinds import Kind
from flashwright.workbench.explain.pictures.regions import region_class
from flashwright.workbench.explain.pictures.svg import counted_label, line, picture, rect, tag, text
from flashwright.workbench.quantities import counted

WIDTH, LEFT, RIGHT = 1200, 172, 16
FLIGHT_TOP, FLIGHT = 78, 24
LANE, LANE_MARK = 26, 16
TICK = 100
NARROWEST_MARK = 1.6
LETTER, BOLD_LETTER = 7.4, 8.4
AWAY = 4
"""Between a name and a line."""
NAME_GAP = 8
"""Between names of phases."""
BEGIN, END = LEFT / WIDTH, (WIDTH - RIGHT) / WIDTH
"""Where the first instruction begins and the last ends, as shares of the picture's width."""
RARE_MARK = 4
"""Waits and barriers are single instructions that matter: they are drawn wider than one."""


@dataclass(frozen=True)
class _Lane:
    label: str
    kinds: tuple[Kind, ...]
    class_: str
    operand: str | None = None
    is_rare: bool = False

    def holds(self, span: Span) -> bool:
        same_operand = self.operand is None or span.operand == self.operand
        return same_operand and any(span.kind == kind.value for kind in self.kinds)


_ARITHMETIC = (
    _Lane("exponential", (Kind.EXPONENTIAL,), "exponential"),
    _Lane("fp32 arithmetic", (Kind.FLOAT,), "float"),
    _Lane("shuffle, convert", (Kind.SHUFFLE, Kind.CONVERT), "shuffle"),
    _Lane("integers, branches", (Kind.INTEGER, Kind.MOVE, Kind.CONTROL, Kind.LOCAL, Kind.OTHER), "other"),
)
_WARP = (
    _Lane("start a copy", (Kind.COPY,), "copy"),
    _Lane("commit, wait", (Kind.WAIT,), "wait", is_rare=True),
    _Lane("barrier", (Kind.BARRIER,), "barrier", is_rare=True),
    _Lane("global memory", (Kind.GLOBAL,), "copy"),
    _Lane("shared memory", (Kind.SHARED,), "load"),
    _Lane("ldmatrix Q", (Kind.LOAD,), "load", "Q"),
    _Lane("ldmatrix K", (Kind.LOAD,), "load", "K"),
    _Lane("ldmatrix V", (Kind.LOAD,), "load", "V"),
    *(_Lane(f"ldmatrix {operand}", (Kind.LOAD,), "load", operand) for operand in ("dO", "P", "dS")),
    _Lane("mma", (Kind.MMA,), "mma"),
    *_ARITHMETIC,
)
_CONSUMER = (
    _Lane("turns", (Kind.BARRIER,), "barrier", "turn", is_rare=True),
    _Lane("guesses", (Kind.VOTE,), "barrier", "guess", is_rare=True),
    _Lane("is K full?", (Kind.WAIT,), "copy", "K", is_rare=True),
    _Lane("is V full?", (Kind.WAIT,), "copy", "V", is_rare=True),
    *(_Lane(f"is {operand} full?", (Kind.WAIT,), "copy", operand, is_rare=True) for operand in ("Q", "dO")),
    _Lane("wgmma S", (Kind.MMA,), "mma", "S", is_rare=True),
    _Lane("wgmma O", (Kind.MMA,), "mma", "O", is_rare=True),
    *(_Lane(f"wgmma {product}", (Kind.MMA,), "mma", product, is_rare=True) for product in ("dP", "dV", "dK", "dQ")),
    _Lane("commit, wait", (Kind.PRODUCT_WAIT,), "wait", is_rare=True),
    _Lane("blocks are read", (Kind.BARRIER,), "load", "release", is_rare=True),
    *_ARITHMETIC,
)
_PRODUCER = (
    _Lane("is K empty?", (Kind.WAIT,), "wait", "K", is_rare=True),
    _Lane("is V empty?", (Kind.WAIT,), "wait", "V", is_rare=True),
    *(_Lane(f"is {operand} empty?", (Kind.WAIT,), "wait", operand, is_rare=True) for operand in ("Q", "dO")),
    _Lane("announce bytes", (Kind.BARRIER,), "barrier", "announce", is_rare=True),
    _Lane("copy K", (Kind.COPY,), "copy", "K", is_rare=True),
    _Lane("copy V", (Kind.COPY,), "copy", "V", is_rare=True),
    *(_Lane(f"copy {operand}", (Kind.COPY,), "copy", operand, is_rare=True) for operand in ("Q", "dO")),
    *_ARITHMETIC,
)


@dataclass(frozen=True)
class _Role:
    lanes: tuple[_Lane, ...]
    under_way: str
    described: str


_ROLES = {
    WARP: _Role(_WARP, "copies under way", "Copies"),
    CONSUMER: _Role(_CONSUMER, "products under way", "Products"),
    PRODUCER: _Role(_PRODUCER, "stages taken", "Stages taken"),
}


def _role(timeline: Timeline) -> _Role:
    return _ROLES.get(timeline.role, _ROLES[WARP])


def timeline_picture(timeline: Timeline, name: str = "timeline", *, instructions_across: int | None = None) -> str:
    """The whole width shows the timeline, or so many instructions: then several are on one scale."""
    across = max(timeline.instructions, instructions_across or 0)
    lanes = [lane for lane in _role(timeline).lanes if any(lane.holds(span) for span in timeline.spans)]
    rows = _rows(timeline)
    lanes_top = FLIGHT_TOP + max(rows.values(), default=0) * FLIGHT + FLIGHT + 14
    bottom = lanes_top + len(lanes) * LANE
    scale = (WIDTH - LEFT - RIGHT) / across
    parts = [
        *_phases(timeline, scale, bottom),
        *_steps(timeline, scale, bottom),
    ]
    if timeline.flights:
        parts.append(text(_role(timeline).under_way, LEFT - 10, FLIGHT_TOP + 16, "label strong", "end"))
    for flight in timeline.flights:
        begin, end = _room(flight, timeline, rows)
        y = FLIGHT_TOP + rows[flight] * FLIGHT
        parts += _flight(flight, y, scale, timeline.instructions, (_x(begin, scale), _x(end, scale)))
        parts += _arrival(flight, y, scale, timeline.instructions, lanes_top, lanes)
    for index, lane in enumerate(lanes):
        parts += _lane(lane, timeline, lanes_top + index * LANE, scale)
    parts += _axis(timeline.instructions, across, scale, bottom)
    return picture(
        name,
        WIDTH,
        bottom + 44,
        f"{timeline.steps} steps {timeline.first_step} and {timeline.first_step + 1} of the PTX, as {timeline.warp} "
        "executed them",
        _description(timeline),
        parts,
    )


def _description(timeline: Timeline) -> str:
    flights = "; ".join(
        f"{flight.block} from instruction {flight.start} to {'the end' if flight.end is None else flight.end}"
        for flight in timeline.flights
    )
    phases = "; ".join(f"{phase.name} from {phase.start} to {phase.end}" for phase in timeline.phases)
    return (
        f"{timeline.instructions} instructions. {_role(timeline).described}: {flights or 'none'}. "
        f"Arithmetic: {phases or 'none'}."
    )


def _rows(timeline: Timeline) -> dict[Flight, int]:
    """Flights that follow one another share a row: those of an operand, and a producer's of a stage. Those of an
    operand that are under way at the same time have rows below each other."""
    if timeline.role == PRODUCER:
        regions = sorted({flight.region for flight in timeline.flights})
        return {flight: regions.index(flight.region) for flight in timeline.flights}
    row_of: dict[Flight, int] = {}
    rows = 0
    for operand in dict.fromkeys(flight.block.split()[0] for flight in timeline.flights):
        ends: list[int] = []  # of the last flight of each row
        for flight in (each for each in timeline.flights if each.block.split()[0] == operand):
            row = next((row for row, end in enumerate(ends) if end <= flight.start), len(ends))
            ends[row : row + 1] = [timeline.instructions if flight.end is None else flight.end]
            row_of[flight] = rows + row
        rows += len(ends)
    return row_of


def _room(flight: Flight, timeline: Timeline, rows: Mapping[Flight, int]) -> tuple[int, int]:
    """The instructions around a flight that its label may be written over: no other flight of its row is under way,
    and no step begins."""
    end = _end(flight, timeline.instructions)
    others = [other for other in timeline.flights if rows[other] == rows[flight] and other is not flight]
    begins = [*(other.start for other in others), *timeline.step_starts, timeline.instructions]
    ends = [0, *(_end(other, timeline.instructions) for other in others), *timeline.step_starts]
    return max(each for each in ends if each <= max(flight.start, 0)), min(each for each in begins if each >= end)


def _end(flight: Flight, instructions: int) -> int:
    return instructions if flight.end is None else min(flight.end, instructions)


def _x(index: float, scale: float) -> float:
    return LEFT + index * scale


_PHASE_CLASSES = {
    "S = QKᵀ": "phase-qk",
    "softmax": "phase-softmax",
    "O += PV": "phase-pv",
    "rescale O": "phase-rescale",
    "S": "phase-qk",
    "dP": "phase-qk",
    "gradients of scores": "phase-softmax",
    "dV": "phase-pv",
    "dK": "phase-pv",
    "dQ": "phase-pv",
}
"""A phase of another name has the tint of all phases."""
_PHASE_NAMES = (50, 66)
"""Where their names stand."""


def _phases(timeline: Timeline, scale: float, bottom: float) -> Iterator[str]:
    for phase in timeline.phases:
        x, width = _x(phase.start, scale), (phase.end - phase.start) * scale
        classes = f"phase {_PHASE_CLASSES.get(phase.name, '')}".rstrip()
        yield rect(x, 34, width, bottom - 34, classes, f"{phase.name}: from {phase.start} to {phase.end}")
    written_up_to = dict.fromkeys(_PHASE_NAMES, 0.0)
    for phase in timeline.phases:  # above all tints, as a name may be longer than its phase
        half = BOLD_LETTER * len(phase.name) / 2
        middle = _within_step(phase, timeline, scale, half)
        # A name that is longer than its phase goes below one that it would run into, or stays in the tooltip.
        free = next((y for y, end in written_up_to.items() if middle - half >= end + NAME_GAP), None)
        if free is not None:
            yield text(phase.name, middle, free, "phase-name", "middle")
            written_up_to[free] = middle + half


def _within_step(phase: Phase, timeline: Timeline, scale: float, half: float) -> float:
    """The middle of a phase, moved so far that its name crosses neither line of its step nor the picture's edge."""
    middle = (phase.start + phase.end) / 2
    begin = max((start for start in timeline.step_starts if start <= middle), default=0)
    ends = (_x(start, scale) for start in timeline.step_starts if middle < start < timeline.instructions)
    least, most = _x(begin, scale) + half, min(ends, default=WIDTH) - half
    return min(max(_x(middle, scale), least + AWAY), most - AWAY)


def _steps(timeline: Timeline, scale: float, bottom: float) -> Iterator[str]:
    for number, (start, end) in enumerate(pairwise(timeline.step_starts)):
        x = _x(start, scale)
        yield line(x, 8, x, bottom, "step")
        name, size = f"step {timeline.first_step + number}", end - start
        labels = (f"{timeline.steps} {name}: {counted(size, 'instruction')}", f"{name}: {size:,}", name)
        room = size * scale - 6
        yield text(next((each for each in labels if BOLD_LETTER * len(each) <= room), name), x + 6, 22, "label strong")


def _flight(flight: Flight, y: float, scale: float, instructions: int, room: tuple[float, float]) -> Iterator[str]:
    """A bar, labelled inside, beside the frame of its start; or, where there is room, behind its end or before it."""
    start, end = max(flight.start, 0), _end(flight, instructions)
    x, right = _x(start, scale), _x(end, scale)
    operand = flight.block.split()[0]
    how = "" if flight.asynchronous else " through registers"
    arrival = "not waited for here" if flight.end is None or flight.end > instructions else f"until {flight.end}"
    tooltip = f"{flight.block} → {flight.region}{how}: from {flight.start} {arrival}"
    yield rect(x, y, max(right - x, 3), 18, f"flight {region_class(operand)}", tooltip, rx=4)
    left = x
    if flight.issued > start:
        framed = max((flight.issued - start) * scale, 2)
        yield rect(x, y, framed, 18, f"issue {region_class(operand)}", rx=4)
        left += framed
    before = "◂ " if flight.start < 0 else ""
    after = " ▸" if flight.end is None or flight.end > instructions else ""
    label = f"{before}{flight.block}{how}{after}"
    if LETTER * len(label) < right - left:
        yield text(label, left + (right - left) / 2, y + 13.5, "bar-label", "middle")
    elif LETTER * len(label) < room[1] - right:
        yield text(label, right + 4, y + 13.5, "label")
    elif LETTER * len(label) < x - room[0]:
        yield text(label, x - 4, y + 13.5, "label", "end")


def _arrival(
    flight: Flight, y: float, scale: float, instructions: int, lanes_top: float, lanes: list[_Lane]
) -> Iterator[str]:
    """A line from the end of a copy to the wait that made it arrive."""
    if flight.asynchronous and flight.end is not None and flight.end <= instructions:
        wait = next((index for index, lane in enumerate(lanes) if lane.class_ == "wait"), 0)
        x = _x(flight.end, scale)
        yield line(x, y + 18, x, lanes_top + wait * LANE + 5, "arrival")


def _lane(lane: _Lane, timeline: Timeline, y: float, scale: float) -> Iterator[str]:
    spans = [span for span in timeline.spans if lane.holds(span)]
    count = sum(span.length for span in spans)
    narrowest = RARE_MARK if lane.is_rare else NARROWEST_MARK
    marks = [
        f"M{_x(span.start, scale):.1f} {y + 5:g}h{max(span.length * scale, narrowest):.1f}v{LANE_MARK}h-"
        f"{max(span.length * scale, narrowest):.1f}z"
        for span in spans
    ]
    yield line(LEFT, y + 5 + LANE_MARK, _x(timeline.instructions, scale), y + 5 + LANE_MARK, "rule")
    yield from counted_label(lane.label, count, LEFT - 10, y + 17.5)
    yield tag("path", d="".join(marks), class_=f"mark mark-{lane.class_}")


def _axis(instructions: int, across: int, scale: float, bottom: float) -> Iterator[str]:
    yield line(LEFT, bottom + 4, _x(instructions, scale), bottom + 4, "axis")
    tick = TICK if across >= 4 * TICK else TICK // 10
    step = tick * max(1, round(across / tick / 14))
    for tick in range(0, instructions + 1, step):
        x = _x(tick, scale)
        yield line(x, bottom + 4, x, bottom + 9, "axis")
        yield text(tick, x, bottom + 22, "label", "middle")
    yield text("executed PTX instructions of the warp, from the start of the step", LEFT, bottom + 40, "label")
    yield text("instructions", LEFT - 10, bottom + 22, "label count", "end")
