"""Searches of many problems on every GPU of a machine: a process on each, all with one database."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashwright.choice.problem import TuningProblem
from flashwright.kernels.registry import family_with_prefix
from flashwright.workbench.environment import GPU, gpus

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Device:
    """One GPU of the machine."""

    visible: str
    """What makes it the only one that a process sees."""
    name: str


@dataclass(frozen=True)
class Outcome:
    """Of one search, on one GPU."""

    problem: TuningProblem
    device: Device
    report: dict[str, Any] | None
    """As `flashwright tune --json` prints it; None if the process failed."""
    error: str = ""


Run = Callable[[Sequence[str], Mapping[str, str]], "tuple[int, str, str]"]
"""Executes `flashwright` with arguments and additions to the environment: exit code, output, errors."""


def visible_devices(found: Sequence[GPU] | None = None, environment: Mapping[str, str] | None = None) -> list[Device]:
    """The GPUs that this process sees."""
    found = gpus() if found is None else found
    listed = (os.environ if environment is None else environment).get(VISIBLE_VARIABLE)
    names = [str(index) for index in range(len(found))] if not listed else listed.split(",")
    return [Device(name.strip(), gpu.name) for name, gpu in zip(names, found, strict=False)]


def search_arguments(problem: TuningProblem, options: Sequence[str]) -> list[str]:
    """The command that searches for one problem's config."""
    family = family_with_prefix(problem.family)
    shared_heads = ["--kv-heads", str(problem.kv_heads)] if problem.kv_heads else []
    return [
        "tune", "--json", "--operation", family.operation.name, "--family", family.name, "--dtype", problem.dtype.name,
        "--d-head", str(problem.d_head), "--causal" if problem.causal else "--no-causal",
        "--rows", str(problem.q_length), "--keys", str(problem.kv_length), "--batch", str(problem.batch),
        "--heads", str(problem.heads), *shared_heads, *options,
    ]  # fmt: skip


def search_on_all(
    problems: Sequence[TuningProblem], devices: Sequence[Device], options: Sequence[str], run: Run | None = None
) -> Iterator[Outcome]:
    """Every problem once on each model of GPU, in the order in which searches end. A GPU that is done takes the next
    problem that its model has left."""
    run = run_process if run is None else run
    waiting: dict[str, queue.SimpleQueue[TuningProblem]] = {}
    for name in {device.name for device in devices}:
        waiting[name] = queue.SimpleQueue()
        for problem in problems:
            waiting[name].put(problem)
    done: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()

    def work(device: Device) -> None:
        try:
            while True:
                problem = waiting[device.name].get_nowait()
                done.put(_searched(problem, device, options, run))
        except queue.Empty:
            pass
        finally:
            done.put(None)

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in devices]
    for thread in threads:
        thread.start()
    remaining = len(threads)
    while remaining:
        outcome = done.get()
        if outcome is None:
            remaining -= 1
        else:
            yield outcome


def _searched(problem: TuningProblem, device: Device, options: Sequence[str], run: Run) -> Outcome:
    try:
        code, out, error = run(search_arguments(problem, options), {VISIBLE_VARIABLE: device.visible})
        if code == 0:
            return Outcome(problem, device, json.loads(out)["searches"][0])
    except (OSError, ValueError, LookupError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    lines = error.strip().splitlines()
    return Outcome(problem, device, None, lines[-1] if lines else f"the search ended with exit code {code}")


def run_process(arguments: Sequence[str], additions: Mapping[str, str]) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "flashwright", *arguments],
        env={**os.environ, **additions},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr
