"""Cases of a parametrised test, by name: some in every run, the others with the slow tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest


def sampled(cases: Mapping[str, Any], slow: Collection[str]) -> list[Any]:
    unknown = set(slow) - set(cases)
    assert not unknown, f"no such cases: {unknown}"
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in slow else []) for name, case in cases.items()
    ]


def first_of(cases: Sequence[Any], count: int) -> list[Any]:
    """Of random cases, any of which is as good as another."""
    return [case if i < count else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(cases)]


def every_other(cases: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    named = dict(cases) if isinstance(cases, Mapping) else {str(case): case for case in cases}
    return sampled(named, slow=list(named)[1::2])
