"""Kernels with one synchronisation broken: the simulated GPU names what is wrong with them.

A mutation is given by the line of CUDA that it breaks. What the compiler made of that line is found in the PTX, by the
locations that the compiler leaves there, and changed there. Where one of several equal lines is broken, or the order of
lines, the source is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from flashwright import AttentionVariant, Kernel, compile_kernel
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.source import device_headers
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.ptx.parser import parse
from flashwright.simulator.ptx.syntax import Instruction, SourceLocation

SYNC, ARRIVE = r"(bar|barrier)(\.cta)?\.sync", r"(bar|barrier)(\.cta)?\.arrive"
ANNOUNCEMENT = "mbarrier_arrive_expecting(slot.full, panels * panel_bytes<rows> + more_bytes);"
# What shows first depends on who comes first: the next copy, the products that read, or the second announcement.
OVERWRITTEN = ("race", "async-copy", "mbarrier")
# Registers of products in flight are touched, or the tiles that they read overwritten.
UNFINISHED = {"wgmma", "race"}
WRONG = "the output is wrong"
"""What a run's own check of its results says."""


# --- Broken PTX ----------------------------------------------------------------------------------------------------


@cache
def source_lines(file: str) -> list[str]:
    return dict(device_headers()).get(file, "").splitlines()


def lines_of(place: SourceLocation | None) -> Iterator[str]:
    """The source line of a place, and those that it was inlined at, outwards."""
    while place is not None:
        lines = source_lines(place.file)
        if 0 < place.line <= len(lines):
            yield lines[place.line - 1].strip()
        place = place.inlined_at


@cache
def entry_of(ptx: str) -> list[Any]:
    (function,) = (function for function in parse(ptx).functions.values() if function.is_entry)
    return function.body


@dataclass(frozen=True)
class Mutation:
    """A change of every instruction of an opcode that comes from a source line, by way of another if that is given."""

    line: str
    opcode: str
    kinds: AbstractSet[str]
    """What it may be reported as; none: only the numbers are wrong."""
    by_way_of: str = ""
    change: Callable[[str], str] = lambda instruction: ""
    run: Callable[[], Any] | None = None
    """What shows it; None: the usual run of a test."""

    def concerns(self, item: Any) -> bool:
        if not isinstance(item, Instruction) or not re.match(self.opcode, item.opcode):
            return False
        lines = list(lines_of(item.source))
        return all(any(text in line for line in lines) for text in (self.line, self.by_way_of))

    def apply(self, ptx: str) -> str:
        lines = ptx.splitlines()
        places = [item.ptx_line - 1 for item in entry_of(ptx) if self.concerns(item)]
        assert places, f"no {self.opcode} comes from `{self.line}`; has the kernel changed?"
        for place in places:
            lines[place] = self.change(lines[place])
        return "\n".join(lines)


def expect_named(mutation: Mutation, run: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of the mutated kernel is stopped, and says where."""

    def compile_broken(config: KernelConfig, arch: str, variant: AttentionVariant, **options: Any) -> Kernel[Any]:
        kernel = compile_kernel(config, arch, variant, **options)
        return replace(kernel, program=replace(kernel.program, ptx=mutation.apply(kernel.ptx)))

    monkeypatch.setattr("flashwright.runtime.simulated.compile_kernel", compile_broken)
    _expect(mutation.kinds, mutation.run or run)


def _expect(kinds: AbstractSet[str], run: Callable[[], Any]) -> None:
    if not kinds:
        with pytest.raises(AssertionError, match=WRONG):
            run()
        return
    with pytest.raises(SimulationError) as caught:
        run()
    assert caught.value.kind in kinds, str(caught.value)
    assert caught.value.kind == "deadlock" or caught.value.source_line is not None


def returning_at_once(instruction: str) -> str:
    """A wait that returns at once: what it waits for counts as there."""
    predicate = re.search(r"try_wait\S*\s+(\w+),", instruction)
    assert predicate is not None
    return f"setp.eq.u32 {predicate[1]}, 0, 0;"


def announcing(bytes_: int) -> Callable[[str], str]:
    return lambda instruction: re.sub(r"%r\d+;", f"{bytes_};", instruction)


def no_wait(line: str, *kinds: str) -> Mutation:
    return Mutation(line, r"mbarrier\.try_wait", set(kinds), change=returning_at_once)


def no_release(line: str) -> Mutation:
    return Mutation(line, r"mbarrier\.arrive", {"deadlock"})


# --- Broken source -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceMutation:
    """Other text in the place of some that occurs once in a file."""

    file: str
    changes: dict[str, str]
    run: Callable[[], Any]
    kinds: AbstractSet[str] = frozenset()
    """What it may be reported as; none: only the numbers are wrong."""

    def apply(self) -> tuple[tuple[str, str], ...]:
        headers = dict(device_headers())
        for text, other in self.changes.items():
            assert headers[self.file].count(text) == 1, f"{self.file} has no `{text}`, or several"
            headers[self.file] = headers[self.file].replace(text, other)
        return tuple(headers.items())


def expect_named_or_wrong(mutation: SourceMutation, sources: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sources` is the module that assembles the kernel's source."""
    monkeypatch.setattr(f"{sources}.device_headers", mutation.apply)
    _expect(mutation.kinds, mutation.run)
