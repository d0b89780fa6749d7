"""Launches of a user's kernels that are to be free of faults, and what was found in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashwright.simulation import simulate_kernel
from flashwright.simulation.source import UserModule, is_expression, user_module
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.findings import Finding, HazardChecks
from flashwright.simulator.kernel_names import plain_name


@dataclass(frozen=True)
class CheckedLaunch:
    """One launch, and all that is wrong with it."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    findings: Sequence[Finding]
    ended: bool
    """Whether it ran to its end; a fault that is no hazard stops it, and is the last finding."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "ended": self.ended,
            "findings": [finding.to_dict() for finding in self.findings],
        }


@dataclass(frozen=True)
class CheckReport:
    """All launches of one file."""

    target: str
    launches: Sequence[CheckedLaunch]
    failure: str | None = None
    """Why a kernel could not be run; launches before it were checked."""

    @property
    def findings(self) -> list[Finding]:
        """Of all launches, each place once."""
        places: dict[tuple[Any, ...], Finding] = {}
        for launch in self.launches:
            for finding in launch.findings:
                place = finding.place
                before = places.get(place)
                places[place] = finding if before is None else Finding(before.error, before.count + finding.count)
        return list(places.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "failure": self.failure,
            "findings": [finding.to_dict() for finding in self.findings],
            "launches": [launch.to_dict() for launch in self.launches],
        }


class FileCheck:
    """Launches of the kernels of one file, which is compiled once for all that compile it alike."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._modules: dict[tuple[Any, ...], UserModule] = {}

    def launch(
        self,
        *,
        kernel: str | None = None,
        arch: str | None = None,
        include: Sequence[str | os.PathLike[str]] = (),
        compiler_options: Sequence[str] = (),
        check_hazards: HazardChecks = "collect",
        **launch: Any,
    ) -> CheckedLaunch:
        """Run a kernel as `simulate_kernel` does; whatever the simulator finds is in the result.

        What keeps a kernel from being run at all (a source that does not compile, an unknown instruction, arguments
        that do not fit) is raised.
        """
        expression = kernel if kernel and is_expression(kernel) else None
        key = (expression, arch, tuple(map(str, include)), tuple(compiler_options))
        if key not in self._modules:
            self._modules[key] = user_module(
                self._path, arch=arch, kernel=expression, include=include, options=compiler_options
            )
        try:
            run = simulate_kernel(self._modules[key], kernel=kernel, check_hazards=check_hazards, **launch).run
        except SimulationError as error:
            if error.kind == "unsupported" or error.kernel is None:
                raise
            findings = [*error.findings, Finding(error, 1)]
            return CheckedLaunch(plain_name(error.kernel), launch["grid"], launch["block"], findings, ended=False)
        return CheckedLaunch(plain_name(run.kernel), run.grid, run.block, run.findings, ended=True)
