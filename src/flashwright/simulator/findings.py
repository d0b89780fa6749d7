"""What becomes of hazards: each kind stops the run, is collected while the run goes on, or is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from .errors import ErrorKind, SimulationError

HazardKind = Literal[
    "uninitialised-shared",
    "uninitialised-global",
    "async-copy",
    "race",
    "global-race",
    "unordered-sum",
    "proxy-fence",
    "mbarrier-fence",
    "wgmma",
]
Reaction = Literal["stop", "collect", "ignore"]
HazardChecks = bool | Reaction | Mapping[HazardKind, Reaction]

HAZARD_KINDS: tuple[HazardKind, ...] = get_args(HazardKind)
"""Faults that leave the run a meaning, so that it can go on after them."""
REACTIONS: tuple[Reaction, ...] = get_args(Reaction)
DEFAULT_REACTIONS: dict[str, Reaction] = {
    **dict.fromkeys(HAZARD_KINDS, "stop"),
    # Triton and cuda::memcpy_async leave this fence out.
    "mbarrier-fence": "collect",
    # Right unless sums are to have the same bits in every run.
    "unordered-sum": "ignore",
}


def reactions_to_all(reaction: Reaction) -> dict[HazardKind, Reaction]:
    """One reaction to all kinds of hazards but those that are looked for only if they are named."""
    return {kind: "ignore" if DEFAULT_REACTIONS[kind] == "ignore" else reaction for kind in HAZARD_KINDS}


@dataclass(frozen=True)
class Finding:
    """One place where a hazard occurred: its first occurrence, and how often accesses of threads met it."""

    error: SimulationError
    count: int

    @property
    def kind(self) -> ErrorKind:
        return self.error.kind

    @property
    def is_warning(self) -> bool:
        """Whether it is collected by default: wrong by the book, and common in kernels that work."""
        return DEFAULT_REACTIONS.get(self.kind) == "collect"

    @property
    def place(self) -> tuple[Any, ...]:
        """What two findings at the same place have in common."""
        return _place_of(self.error)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {**self.error.to_dict(), "count": self.count}

    def __str__(self) -> str:
        times = "once" if self.count == 1 else f"{self.count:,} times"
        return f"{self.error}\n  occurred: {times}"


def _place_of(error: SimulationError) -> tuple[Any, ...]:
    other = error.other and (error.other.ptx_line, error.other.source_line)
    return (error.kind, error.kernel, error.ptx_line, error.source_location, other)


class HazardPolicy:
    """The reaction to each kind of hazard, and what has been collected."""

    def __init__(self, checks: HazardChecks) -> None:
        self._reactions = reactions_by_kind(checks)
        self._found: dict[tuple[Any, ...], tuple[SimulationError, int]] = {}

    @property
    def is_checking(self) -> bool:
        """Whether any kind of hazard is looked for."""
        return any(reaction != "ignore" for reaction in self._reactions.values())

    def looks_for(self, kind: HazardKind) -> bool:
        return self._reactions[kind] != "ignore"

    def reaction_to(self, kind: ErrorKind) -> Reaction:
        """Faults that are no hazards stop the run."""
        return self._reactions.get(kind, "stop")

    def collect(self, error: SimulationError, count: int) -> None:
        """Count an occurrence; of those at one place the first is kept."""
        place = _place_of(error)
        first, before = self._found.get(place, (error, 0))
        self._found[place] = (first, before + count)

    @property
    def findings(self) -> list[Finding]:
        """In the order of their first occurrence."""
        return [Finding(error, count) for error, count in self._found.values()]


def reactions_by_kind(checks: HazardChecks) -> dict[str, Reaction]:
    """The reaction to every kind; the default to kinds that a mapping does not name. ValueError: no such kind."""
    if isinstance(checks, bool):
        return DEFAULT_REACTIONS if checks else dict.fromkeys(HAZARD_KINDS, "ignore")
    if not isinstance(checks, Mapping):
        checks = reactions_to_all(_reaction(checks, ""))
    for kind in checks:
        if kind not in HAZARD_KINDS:
            raise ValueError(f"check_hazards: {kind!r} is no kind of hazard; allowed: {', '.join(HAZARD_KINDS)}")
    return {kind: _reaction(checks.get(kind, DEFAULT_REACTIONS[kind]), f" for {kind}") for kind in HAZARD_KINDS}


def _reaction(value: object, where: str) -> Reaction:
    for reaction in REACTIONS:
        if value == reaction:
            return reaction
    raise ValueError(
        f"check_hazards: {value!r}{where} is not allowed; allowed: True, False, {', '.join(map(repr, REACTIONS))}"
        + ("" if where else ", or a mapping from kinds to these")
    )
