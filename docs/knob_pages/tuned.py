"""What searches on a GPU found of one knob: results that ship with the package, beside their runners-up."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from flashwright.choice.lookup import shipped_results
from flashwright.choice.results import TunedResult
from flashwright.kernels.forward.hopper.config import HopperForwardKernelConfig
from flashwright.problem.dtypes import DType

from .markdown import table


def tuned_pairs(knob: str) -> str:
    """Winners, and runners-up that differ from them in this knob alone; bf16."""
    rows = [row for result in shipped_results() for row in _pairs(result, knob)]
    if not rows:
        return f"No search that ships with the package ended with two kernels that differ in `{knob}` alone."
    header = ["problem", f"`{knob}` of the fastest", f"`{knob}` turned", "its speed, × the fastest"]
    note = (
        "Results of `flashwright tune` that ship with the package, in bf16: the fastest config of a problem, and those "
        "of its runners-up that differ from it in this knob alone, timed in turns on an NVIDIA H200."
    )
    return f"{table(header, sorted(rows), 1)}\n\n{note}"


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
