"""What searches on a GPU found of one knob: results that ship with the package, beside their runners-up.

A search's fastest kernel may be compared with itself with one more knob turned, and ship with it. Such a search is kept
in a file of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from flashwright.choice.lookup import shipped_results
from flashwright.choice.results import TunedResult, from_document
from flashwright.kernels.forward.hopper.config import HopperForwardKernelConfig
from flashwright.problem.dtypes import DType

from .markdown import table

SEARCHES = Path("benchmarks/results/searches_hopper_h200.json")


def tuned_pairs(knob: str, root: Path) -> str:
    """Winners, and runners-up that differ from them in this knob alone; bf16."""
    rows = [row for result in _results(root) for row in _pairs(result, knob)]
    if not rows:
        return f"No search that ships with the package ended with two kernels that differ in `{knob}` alone."
    header = ["problem", f"`{knob}` of the fastest", f"`{knob}` turned", "its speed, × the fastest"]
    note = (
        "Kernels that were compared to the end for the results that ship with the package, in bf16: the fastest config "
        "of a problem, and those of its runners-up that differ from it in this knob alone, timed in turns on an NVIDIA "
        "H200."
    )
    return f"{table(header, sorted(rows), 1)}\n\n{note}"


def _results(root: Path) -> Iterator[TunedResult]:
    yield from shipped_results()
    yield from from_document(json.loads((root / SEARCHES).read_text("utf-8")))


def _pairs(result: TunedResult, knob: str) -> list[list[str]]:
    config = result.config
    if not isinstance(config, HopperForwardKernelConfig) or config.dtype is not DType.BF16:
        return []
    return [
        [
            str(result.problem).partition(", ")[2],
            _value(config, knob),
            _value(other.config, knob),
            f"{result.best.time_ms / other.time_ms:.3f}",
        ]
        for other in result.runners_up
        if _differing(config, other.config) == [knob]
    ]


def _differing(one: Any, other: Any) -> list[str]:
    return [field.name for field in fields(one) if getattr(one, field.name) != getattr(other, field.name)]


def _value(config: Any, knob: str) -> str:
    value = getattr(config, knob)
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
