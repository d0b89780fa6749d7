"""`flashwright simulate`: a config on random inputs, or any PTX file with arguments written as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer

from flashwright.cli.output import JsonOption, print_json
from flashwright.kernels.family import OLDEST, KernelConfig
from flashwright.kernels.registry import parse_config, tile_shapes
from flashwright.problem.reference import random_inputs, reference_forward, relative_error
from flashwright.runtime.simulated import simulate_forward
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

ARGUMENT_TYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "i8": np.int8,
        "u8": np.uint8,
        "i16": np.int16,
        "u16": np.uint16,
        "i32": np.int32,
        "u32": np.uint32,
        "i64": np.int64,
        "u64": np.uint64,
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "f32": np.float32,
        "f64": np.float64,
    }.items()
}


def simulate(
    target: Annotated[str, typer.Argument(help="A PTX file, or a config's short form.", metavar="FILE.ptx|CONFIG")],
    kernel: Annotated[str | None, typer.Option(help="PTX: the kernel to launch, if there are several.")] = None,
    grid: Annotated[str, typer.Option(help="PTX: thread blocks, as X or X,Y,Z.")] = "1",
    block: Annotated[str, typer.Option(help="PTX: threads per block, as X or X,Y,Z.")] = "32",
    shared_bytes: Annotated[int, typer.Option(help="PTX: dynamic shared memory.")] = 0,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            help="PTX: an argument, in order: TYPE:VALUE for a number (i32:7, f32:0.5), or zeros:TYPE:SIZE or "
            "random:TYPE:SIZE for a pointer to new memory (random:f32:1024)."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(help="CONFIG: rows of q, k and v.")] = 256,
    heads: Annotated[int, typer.Option(help="CONFIG: heads.")] = 2,
    arch: Annotated[
        str | None,
        typer.Option(help="The simulated architecture.", show_default="the oldest of the config's family; PTX: sm_80"),
    ] = None,
    hazards: Annotated[bool, typer.Option(help="Check for races, missing waits and uninitialised reads.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Run a kernel on the simulated GPU and print what it did."""
    if target.endswith(".ptx"):
        text = Path(target).read_text("utf-8")
        result = simulate_ptx(
            text, kernel, grid, block, shared_bytes, arg or [], arch=arch or "sm_80", check_hazards=hazards
        )
    else:
        config = parse_config(target)
        tile_shapes(config)
        result = simulate_config(config, rows=rows, heads=heads, arch=arch or OLDEST, check_hazards=hazards)
    if as_json:
        print_json(result.to_dict())
    else:
        print(result.report())


@dataclass(frozen=True)
class SimulationResult:
    """A run, and a line on what it computed."""

    run: Run
    facts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {**self.facts, **self.run.to_dict()}

    def report(self) -> str:
        lines = [f"{name.replace('_', ' ')}: {value}" for name, value in self.facts.items()]
        return "\n".join([*lines, self.run.report()])


def simulate_config(config: KernelConfig, *, rows: int, heads: int, arch: str, check_hazards: bool) -> SimulationResult:
    """A config's kernel on random inputs, checked against the float64 reference."""
    inputs = random_inputs(config, heads=heads, rows=rows)
    simulation = simulate_forward(config, *inputs, arch=arch, check_hazards=check_hazards)
    error = relative_error(simulation.output, reference_forward(*inputs)[0])
    return SimulationResult(simulation.run, {"config": config.short_form(), "relative_error": error})


def simulate_ptx(
    ptx: str,
    kernel: str | None,
    grid: str,
    block: str,
    shared_bytes: int,
    arguments: Sequence[str],
    *,
    arch: str,
    check_hazards: bool,
) -> SimulationResult:
    """A kernel of a PTX text, launched with arguments such as `random:f32:1024` or `i32:7`."""
    gpu = SimulatedGPU(arch)
    module = gpu.load(ptx)
    if kernel is None:
        if len(module.kernels) != 1:
            raise ValueError(f"--kernel: the file has {len(module.kernels)} kernels; choose one of {module.kernels}")
        kernel = module.kernels[0]
    elif kernel not in module.kernels:
        raise ValueError(f"--kernel: {kernel!r} is not in the file; it has {module.kernels}")
    run = module.launch(
        kernel,
        grid=_dimensions("--grid", grid),
        block=_dimensions("--block", block),
        shared_bytes=shared_bytes,
        args=[_argument(gpu, text) for text in arguments],
        check_hazards=check_hazards,
    )
    return SimulationResult(run, {"kernel": kernel})


def _dimensions(option: str, text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{option}: {text!r} is not a size; expected X, X,Y or X,Y,Z with positive integers")
    x, y, z = [*map(int, parts), 1, 1][:3]
    return x, y, z


def _argument(gpu: SimulatedGPU, text: str) -> Any:
    match text.split(":"):
        case [("zeros" | "random") as fill, type_name, size] if type_name in ARGUMENT_TYPES and size.isdigit():
            values = np.zeros(int(size)) if fill == "zeros" else np.random.default_rng(0).standard_normal(int(size))
            return gpu.to_device(values.astype(ARGUMENT_TYPES[type_name]))
        case [type_name, value] if type_name in ARGUMENT_TYPES:
            try:
                return ARGUMENT_TYPES[type_name].type(value)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"--arg: {text!r}: {error}") from error
    raise ValueError(
        f"--arg: {text!r} is not an argument; expected TYPE:VALUE, zeros:TYPE:SIZE or random:TYPE:SIZE "
        f"with TYPE one of {', '.join(ARGUMENT_TYPES)}"
    )
