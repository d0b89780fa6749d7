"""Measured results, found by what is about to be computed: the user's own, and those of the package."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple

from flashwright.choice.currency import is_current, measured_at
from flashwright.choice.database import DatabaseUnusable, TuningDatabase
from flashwright.choice.problem import ProblemKind
from flashwright.choice.results import TunedResult, TuningFileError, from_document
from flashwright.kernels.family import KernelFamily, Occasion
from flashwright.problem.lengths import LENGTH_BUCKETS

Results = Mapping[tuple[str, ProblemKind], TunedResult]


class Measured(NamedTuple):
    """A measured result, and whose it is."""

    result: TunedResult
    source: Literal["tuned", "shipped"]
    """The user's own tuning, or the package's files."""


def measured_result(family: KernelFamily, occasion: Occasion) -> Measured | None:
    """The fastest config measured for such problems, or for those with as many queries and nearly as many keys."""
    if occasion.gpu is None:
        return None
    for bucket in _nearest_first(occasion.kv_bucket):
        kind = ProblemKind(family.prefix, occasion.dtype, occasion.d_head, occasion.causal, occasion.q_bucket, bucket)
        if (measured := _best_result(occasion.gpu.name, kind)) is not None:
            return measured
    return None


def _best_result(gpu: str, kind: ProblemKind) -> Measured | None:
    """Of the user's result and the shipped one: that of the installed kernels, else the later, else the user's."""
    key = (gpu, kind)
    candidates: list[Measured] = []
    if (own := _user_results().get(key)) is not None:
        candidates.append(Measured(own, "tuned"))
    if (shipped := _shipped_results().get(key)) is not None:
        candidates.append(Measured(shipped, "shipped"))
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    return max(candidates, key=lambda each: (is_current(each.result), measured_at(each.result)))  # the first of equals


def _nearest_first(bucket: str) -> list[str]:
    position = LENGTH_BUCKETS.index(bucket)
    return sorted(LENGTH_BUCKETS, key=lambda other: abs(LENGTH_BUCKETS.index(other) - position))


def shipped_results() -> Iterator[TunedResult]:
    """The results in the package's own files."""
    folder = resources.files("flashwright.choice") / "shipped"
    if not folder.is_dir():
        return
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            yield from from_document(json.loads(file.read_text("utf-8")))


@cache
def _shipped_results() -> Results:
    try:
        return _by_key(shipped_results())
    except (OSError, TuningFileError, json.JSONDecodeError) as error:
        return _none_after_warning(f"the tuning results of this installation cannot be read ({error})")


@cache
def _user_results() -> Results:
    try:
        return _by_key(TuningDatabase().results())
    except DatabaseUnusable as error:
        return _none_after_warning(str(error))


def _by_key(results: Iterable[TunedResult]) -> Results:
    return {result.key: result for result in results}


def _none_after_warning(message: str) -> Results:
    warnings.warn(f"{message}; default configs are used instead", RuntimeWarning, stacklevel=2)
    return {}


def forget_results() -> None:
    """The next lookup reads everything anew."""
    _shipped_results.cache_clear()
    _user_results.cache_clear()
