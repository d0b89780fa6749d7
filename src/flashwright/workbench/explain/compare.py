"""Two configs side by side: what differs between their tables, what is the same, and what speaks for which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashwright.kernels.registry import parse_config
from flashwright.workbench.explain.facts import ConfigFacts
from flashwright.workbench.explain.report import (
    BESIDE_A_REJECTION,
    EFFECT_NAMES,
    Row,
    Section,
    Value,
    differences,
    is_better,
    sections,
)

ABSENT = "–"


@dataclass(frozen=True)
class ComparedRow:
    name: str
    values: tuple[Value, Value]
    notes: tuple[str, str]

    @property
    def differs(self) -> bool:
        return self.values[0] != self.values[1]


@dataclass(frozen=True)
class ComparedSection:
    key: str
    title: str
    rows: tuple[ComparedRow, ...]
    remark: str

    @property
    def differing(self) -> tuple[ComparedRow, ...]:
        return tuple(row for row in self.rows if row.differs)

    @property
    def same(self) -> tuple[ComparedRow, ...]:
        return tuple(row for row in self.rows if not row.differs)


@dataclass(frozen=True)
class ComparedEffect:
    """A figure by which configs are judged: of the first, of the second, and whether it speaks for the second."""

    name: str
    values: tuple[float | None, float | None]
    difference: float | None
    second_is_better: bool | None
    """None if they are equal, if one is unknown, or if the difference says nothing."""


@dataclass(frozen=True)
class Comparison:
    facts: tuple[ConfigFacts, ConfigFacts]
    sections: tuple[ComparedSection, ...]
    left_out: int = 0
    """Facts that are the same in both and in no section."""

    @property
    def differing(self) -> int:
        return sum(len(section.differing) for section in self.sections)

    @property
    def facts_compared(self) -> int:
        return sum(len(section.rows) for section in self.sections) + self.left_out

    @property
    def labels(self) -> tuple[str, str]:
        return config_labels(*(facts.config for facts in self.facts))

    @property
    def effects(self) -> tuple[ComparedEffect, ...]:
        """Operations and head dimensions are different problems: between them no figure is judged."""
        first, second = self.facts
        of_one_problem = len({(facts.operation, parse_config(facts.config).d_head) for facts in self.facts}) == 1
        fixed_by_launch = any(facts.registers.reallocations for facts in self.facts)
        return tuple(
            ComparedEffect(
                name,
                (getattr(first.effects, name), getattr(second.effects, name)),
                difference,
                is_better(name, difference, fewer_registers_are_better=not fixed_by_launch) if of_one_problem else None,
            )
            for name, difference in differences(first.effects, second.effects).items()
        )

    def effects_judged(self, second_is_better: bool) -> tuple[str, ...]:
        """The figures that speak for the second, or for the first."""
        return tuple(EFFECT_NAMES[each.name] for each in self.effects if each.second_is_better is second_is_better)

    def only_differing(self) -> Comparison:
        """Without the facts that are the same in both."""
        kept = (replace(section, rows=section.differing) for section in self.sections)
        left_out = self.facts_compared - self.differing
        return Comparison(self.facts, tuple(section for section in kept if section.rows), left_out)

    def to_dict(self) -> dict[str, Any]:
        return {
            "configs": [facts.config for facts in self.facts],
            "arch": self.facts[0].arch,
            "sample": self.facts[0].sample.to_dict(),
            "differing": self.differing,
            "effects": [asdict(effect) for effect in self.effects],
            "sections": [
                {
                    "section": section.key,
                    "title": section.title,
                    "rows": [
                        {"name": row.name, "values": list(row.values), "notes": list(row.notes), "differs": row.differs}
                        for row in section.rows
                    ],
                }
                for section in self.sections
            ],
        }


def config_labels(first: str, second: str) -> tuple[str, str]:
    """Two short forms by what tells them apart: family and sizes, or the options that one alone has."""
    (head, options), (other_head, other_options) = _parted(first), _parted(second)
    if head != other_head:
        return head, other_head
    if first == second:
        return first, second
    return _own_options(options, other_options), _own_options(other_options, options)


def _own_options(own: list[str], other: list[str]) -> str:
    alone = [option for option in own if option not in other]
    return "+".join(alone) if alone else "without " + "+".join(option for option in other if option not in own)


def _parted(short_form: str) -> tuple[str, list[str]]:
    head, _, options = short_form.partition(": ")
    return head, [option for option in options.split("+") if option]


def compare_facts(first: ConfigFacts, second: ConfigFacts) -> Comparison:
    """Both configs' tables, row by row."""
    pairs = zip(_facts_once(first), _facts_once(second), strict=True)
    return Comparison((first, second), tuple(_compare_sections(left, right) for left, right in pairs))


def _facts_once(facts: ConfigFacts) -> Iterator[Section]:
    """The tables without what the filter's repeats of others, beside a rejection alone."""
    for section in sections(facts):
        repeated = BESIDE_A_REJECTION if section.key == "verdict" else ()
        yield replace(section, rows=tuple(row for row in section.rows if row.name not in repeated))


def _compare_sections(left: Section, right: Section) -> ComparedSection:
    names = _merged([row.name for row in left.rows], [row.name for row in right.rows])
    rows = []
    for name in names:
        found = [_row_named(section, name) for section in (left, right)]
        rows.append(ComparedRow(name, (found[0].value, found[1].value), (found[0].note, found[1].note)))
    title = left.title if left.title == right.title else f"{left.title}; {right.title}"
    return ComparedSection(left.key, title, tuple(rows), left.remark or right.remark)


def _row_named(section: Section, name: str) -> Row:
    return next((row for row in section.rows if row.name == name), Row(name, ABSENT))


def _merged(left: list[str], right: list[str]) -> list[str]:
    """Both orders in one: a name that only the right has comes after the one it follows there."""
    merged = list(left)
    for index, name in enumerate(right):
        if name not in merged:
            place = merged.index(right[index - 1]) + 1 if index else 0
            merged.insert(place, name)
    return merged
