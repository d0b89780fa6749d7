"""Two configs side by side: the same tables, with the rows that differ marked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashwright.workbench.explain.facts import ConfigFacts
from flashwright.workbench.explain.report import Row, Section, Value, sections

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


@dataclass(frozen=True)
class Comparison:
    facts: tuple[ConfigFacts, ConfigFacts]
    sections: tuple[ComparedSection, ...]

    @property
    def differing(self) -> int:
        return sum(row.differs for section in self.sections for row in section.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "configs": [facts.config for facts in self.facts],
            "arch": self.facts[0].arch,
            "sample": self.facts[0].sample.to_dict(),
            "differing": self.differing,
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


def compare_facts(first: ConfigFacts, second: ConfigFacts) -> Comparison:
    """Both configs' tables, row by row."""
    pairs = zip(sections(first), sections(second), strict=True)
    return Comparison((first, second), tuple(_compare_sections(left, right) for left, right in pairs))


def _compare_sections(left: Section, right: Section) -> ComparedSection:
    names = _merged([row.name for row in left.rows], [row.name for row in right.rows])
    rows = []
    for name in names:
        found = [_row_named(section, name) for section in (left, right)]
        rows.append(ComparedRow(name, (found[0].value, found[1].value), (found[0].note, found[1].note)))
    return ComparedSection(left.key, left.title, tuple(rows), left.remark or right.remark)


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
