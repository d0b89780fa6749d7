"""What a kernel family says about its configs by arithmetic alone: one module each, and how to find it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from flashwright.architectures import Architecture
from flashwright.explain import ampere, hopper
from flashwright.explain.facts import Buffering, Knob, Reallocation, RegisterPhase, Shape, SharedMap
from flashwright.families import AMPERE, HOPPER, ForwardKernelConfig, family_of


class ConfigArithmetic(Protocol):
    """What such a module has."""

    FAMILY: str
    KNOBS_TO_TURN: tuple[str, ...]

    def knobs(self, config: Any) -> tuple[Knob, ...]:
        """Every field of the config, with what its value does."""

    def shapes(self, config: Any) -> tuple[Shape, ...]:
        """The derived sizes, by the names the kernel uses."""

    def rejection_reason(self, config: Any) -> str | None:
        """Why the tuner would not time it."""

    def register_phases(self, config: Any) -> tuple[RegisterPhase, ...]:
        """The operands alive in each part of a KV step."""

    def register_limit(self, config: Any, arch: Architecture) -> int:
        """The most that a thread which computes can have."""

    def reallocations(self, config: Any) -> tuple[Reallocation, ...]:
        """What warps have after launch, where that changes."""

    def shared_map(self, config: Any, arch: Architecture) -> SharedMap:
        """Where the blocks lie, by byte offset."""

    def buffering(self, config: Any) -> tuple[Buffering, ...]:
        """Per operand of the two products, whether it is double-buffered in registers."""

    def neighbours(self, config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each change of one knob worth looking at: in words, and as fields for `dataclasses.replace`."""

    def work_per_step(self, config: Any) -> int:
        """Scores that one warp computes in one KV step."""

    def steps_before_loop(self, config: Any) -> int:
        """KV steps outside of the loop, in front of it."""

    def row_stride(self, config: Any) -> int:
        """Elements from a row of the simulated tensors to the next."""


_ARITHMETIC: dict[str, ConfigArithmetic] = {AMPERE.name: ampere, HOPPER.name: hopper}


def arithmetic_of(config: ForwardKernelConfig) -> ConfigArithmetic:
    return _ARITHMETIC[family_of(config).name]
