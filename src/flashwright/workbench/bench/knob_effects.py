"""The effect of each knob of the Ampere family: two base kernels, and every kernel one turn of one knob away from them.

All kernels of the same dtype and head dimension are timed in turns, beside FlashAttention-2. A GPU at its power limit
runs faster after a kernel that left it cool, so the turns are shuffled, and each is warmed up by itself. The base
kernels are timed twice, as two candidates: their difference is the spread of the measurement.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from flashwright.kernels.forward.ampere.config import FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.explain import neighbours
from flashwright.kernels.forward.ampere.ladder import get_kernel_progression_configs
from flashwright.kernels.forward.ampere.names import parse_kernel_name_into_config
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes
from flashwright.problem.dtypes import DType
from flashwright.workbench.bench.grid import Cell, cell_of
from flashwright.workbench.bench.measure import Machine, Prepare, measure_cell
from flashwright.workbench.bench.peers import PEERS, Inputs, Prepared
from flashwright.workbench.bench.result_files import parsed_entries, read_document, write_document
from flashwright.workbench.bench.results import CellResult
from flashwright.workbench.bench.timing import CapturedCall, Name

PEER = "sdpa-fa2"
LENGTHS = (512, 4096)
AGAIN = " (again)"
ROUNDS = 15
OTHER_D_HEADS = (64, 256)


@dataclass(frozen=True)
class Turn:
    """One knob turned, and the resulting config; or why no kernel can be built from it."""

    knob: str
    change: str
    config: FlashForwardKernelConfig | None
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        config = None if self.config is None else self.config.short_form()
        return {"knob": self.knob, "change": self.change, "config": config, "problem": self.problem}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Turn:
        config = None if values["config"] is None else parse_kernel_name_into_config(values["config"])
        return cls(values["knob"], values["change"], config, values["problem"])


@dataclass(frozen=True)
class Base:
    """A kernel to start from."""

    name: str
    config: FlashForwardKernelConfig
    turns: tuple[Turn, ...]

    def turns_of(self, knob: str) -> tuple[Turn, ...]:
        return tuple(turn for turn in self.turns if turn.knob == knob)

    def to_dict(self) -> dict[str, Any]:
        turns = [turn.to_dict() for turn in self.turns]
        return {"name": self.name, "config": self.config.short_form(), "turns": turns}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Base:
        turns = tuple(Turn.from_dict(turn) for turn in values["turns"])
        return cls(values["name"], parse_kernel_name_into_config(values["config"]), turns)


@dataclass(frozen=True)
class KnobEffects:
    environment: Mapping[str, Any]
    bases: tuple[Base, ...]
    cells: tuple[CellResult, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "environment": dict(self.environment),
            "bases": [base.to_dict() for base in self.bases],
            "cells": [cell.to_dict() for cell in self.cells],
        }


def early_config() -> FlashForwardKernelConfig:
    """The ladder's sixth rung as the filter prefers it: Q held in registers, no double buffering."""
    return parse_kernel_name_into_config("(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")


def bases() -> tuple[Base, ...]:
    """The two kernels from which knobs are turned: an early one, and the ladder's last."""
    configs = {"early": early_config(), "final": get_kernel_progression_configs()[-1]}
    return tuple(Base(name, config, tuple(turns(config))) for name, config in configs.items())


def turns(config: FlashForwardKernelConfig) -> Iterator[Turn]:
    """Every knob of a config turned alone, including `dtype` and `d_head`, which change the problem."""
    other = DType.BF16 if config.dtype is DType.FP16 else DType.FP16
    yield _turn(config, f"dtype: {config.dtype.name} → {other.name}", {"dtype": other})
    for d_head in OTHER_D_HEADS:
        yield _turn(config, f"d_head: {config.d_head} → {d_head}", {"d_head": d_head})
    for change, values in neighbours(config):
        yield _turn(config, change, values)


def _turn(config: FlashForwardKernelConfig, change: str, values: Mapping[str, Any]) -> Turn:
    (knob,) = values
    try:
        turned = replace(config, **values)
        ForwardKernelTileShapes(turned)
    except ValueError as problem:
        return Turn(knob, change, None, str(problem))
    return Turn(knob, change, turned)


def configs_of(bases: Sequence[Base]) -> list[FlashForwardKernelConfig]:
    """Every config that a kernel can be built from, each once."""
    found = (config for base in bases for config in (base.config, *(turn.config for turn in base.turns)) if config)
    return list(dict.fromkeys(found))


def measure_knobs(
    machine: Machine,
    bases: Sequence[Base],
    prepare: Callable[[FlashForwardKernelConfig, Inputs], Prepared],
    *,
    lengths: Sequence[int] = LENGTHS,
    advance: Callable[[], None] = lambda: None,
) -> tuple[CellResult, ...]:
    """Times of every config at every length. A config that fails is recorded with its reason."""
    cells = []
    for (dtype, d_head), configs in _by_problem(configs_of(bases)).items():
        candidates: dict[str, Prepare] = {PEER: PEERS[PEER].prepare}
        candidates |= {config.short_form(): partial(prepare, config) for config in configs}
        for base in bases:
            if base.config in configs:
                candidates[base.config.short_form() + AGAIN] = partial(prepare, base.config)
        for length in lengths:
            cells.append(measure_cell(machine, cell_of(dtype, d_head, False, length), candidates))
            advance()
    return tuple(cells)


def shuffled_times_ms(
    captured: Mapping[Name, CapturedCall],
    replay_ms: Callable[[Mapping[Name, CapturedCall]], Mapping[Name, float]],
    *,
    rounds: int = ROUNDS,
) -> dict[Name, float]:
    """Median milliseconds of each over rounds of shuffled order; `replay_ms` warms one of them up and times it."""
    order, shuffle = list(captured), random.Random(0).shuffle
    times: dict[Name, list[float]] = {name: [] for name in captured}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(replay_ms({name: captured[name]})[name])
    return {name: statistics.median(values) for name, values in times.items()}


def problems_of(bases: Sequence[Base]) -> int:
    """The number of pairs of dtype and head dimension, each measured at every length."""
    return len(_by_problem(configs_of(bases)))


def _by_problem(
    configs: Sequence[FlashForwardKernelConfig],
) -> dict[tuple[DType, int], list[FlashForwardKernelConfig]]:
    groups: dict[tuple[DType, int], list[FlashForwardKernelConfig]] = {}
    for config in configs:
        groups.setdefault((config.dtype, config.d_head), []).append(config)
    return groups


@dataclass(frozen=True)
class Effect:
    """A config's time at one length, beside the kernel it was turned from and FlashAttention-2."""

    cell: Cell
    tflops: float
    times_base: float | None
    """Speed relative to the base; None where the base computes another problem."""
    times_peer: float | None


def effect(effects: KnobEffects, base: Base, config: FlashForwardKernelConfig, length: int) -> Effect | str | None:
    """The measured effect of a config, the reason of its failure, or None if the results do not contain it."""
    name = config.short_form()
    for result in effects.cells:
        cell = result.cell
        if (cell.dtype, cell.d_head, cell.length) != (config.dtype, config.d_head, length):
            continue
        if name in result.failures:
            return result.failures[name]
        measured = result.measurements.get(name)
        if measured is None:
            continue
        beside = {other: result.measurements.get(other) for other in (base.config.short_form(), PEER)}
        times = [None if other is None else other.gpu_ms / measured.gpu_ms for other in beside.values()]
        return Effect(cell, cell.tflops(measured.gpu_ms), times[0], times[1])
    return None


def spread(effects: KnobEffects) -> float | None:
    """The largest relative difference between two timings of the same kernel."""
    differences = [
        abs(measured.gpu_ms / again.gpu_ms - 1)
        for result in effects.cells
        for name, measured in result.measurements.items()
        if (again := result.measurements.get(name + AGAIN)) is not None
    ]
    return max(differences, default=None)


def write_knob_effects(path: Path, effects: KnobEffects) -> None:
    write_document(path, effects.to_dict())


def read_knob_effects(path: Path) -> KnobEffects:
    document = read_document(path, holding="bases", made_by="benchmarks/knob_effects.py")
    return KnobEffects(
        document.get("environment", {}),
        tuple(parsed_entries(path, document, "bases", Base.from_dict)),
        tuple(parsed_entries(path, document, "cells", CellResult.from_dict)),
    )
