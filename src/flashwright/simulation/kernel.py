"""A user's kernel on the simulated GPU, from CUDA C++ or PTX, with arrays in and out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashwright.hardware.tensor_map import TensorMap
from flashwright.simulation.source import Source, UserModule, user_module
from flashwright.simulator.findings import HazardChecks
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.kernel_names import find_kernel, plain_name
from flashwright.simulator.ptx.syntax import Variable
from flashwright.simulator.run import Run, counted


@dataclass(frozen=True)
class Uninitialised:
    """An array that a kernel is to fill: reading it before is a hazard."""

    shape: int | tuple[int, ...]
    dtype: Any = np.float32

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class KernelSimulation:
    """A simulated kernel: its arguments as it left them, and all that was counted on the way."""

    args: list[Any]
    """The arguments in their order: arrays with what the kernel wrote to them, numbers as they were given."""
    run: Run
    module: UserModule

    def report(self) -> str:
        """The run's report, and its counters beside the lines of the source, if it is CUDA."""
        if self.module.cuda is None:
            return self.run.report()
        return f"{self.run.report(source_lines=0)}\n\n{self.source_report()}"

    def source_report(self) -> str:
        """Counters beside the executed lines of the CUDA source; empty of PTX."""
        return "" if self.module.cuda is None else self.run.annotated(self.module.name, self.module.cuda)


def simulate_kernel(
    source: Source | UserModule,
    grid: Sequence[int] | int = 1,
    block: Sequence[int] | int = 32,
    args: Sequence[Any] = (),
    *,
    kernel: str | None = None,
    shared_bytes: int = 0,
    variables: Mapping[str, Any] | None = None,
    arch: str | None = None,
    include: Sequence[str | os.PathLike[str]] = (),
    compiler_options: Sequence[str] = (),
    check_hazards: HazardChecks = True,
    **launch_options: Any,
) -> KernelSimulation:
    """Compile (CUDA C++) and run a kernel on the simulated GPU; the arrays come back in ``.args``.

    ``source`` is the path of a `.cu` or `.ptx` file, or the text of one; or the ``.module`` of an earlier simulation,
    which is not compiled again. Arguments are passed as the kernel declares
    them: an array is copied to the device, and the same array given twice is the same memory there; `Uninitialised`
    is memory without content; a number becomes the parameter's type; `bytes` are a structure by value, `TensorMap` a
    tensor map. ``variables`` sets `__constant__` and `__device__` variables. ``kernel`` is a kernel's name, needed if
    there are several, or a C++ expression that instantiates a template. ``arch`` is what CUDA is compiled for (sm_80 by
    default), and the simulated architecture. ``launch_options`` are those of `Module.launch`.
    """
    if isinstance(source, UserModule):
        module = source
    else:
        module = user_module(source, arch=arch, kernel=kernel, include=include, options=compiler_options)
    gpu = SimulatedGPU(module.arch)
    loaded = gpu.load(module.ptx)
    symbol = module.kernel or find_kernel(loaded.kernels, kernel)
    program = loaded.program(symbol)
    for name, value in (variables or {}).items():
        loaded.write(name, value if isinstance(value, bytes) else np.asarray(value))
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        raise TypeError(f"args: expected a list of the kernel's arguments, got {type(args).__name__}")
    if len(args) != len(program.parameters):
        declared = ", ".join(f".{item.type.name}" for item in program.parameters) or "none"
        takes = counted(len(program.parameters), "argument")
        raise ValueError(f"kernel {plain_name(symbol)} takes {takes} ({declared}), {len(args)} were given")
    passed, addresses = _passed(gpu, args, program.parameters)
    run = loaded.launch(symbol, grid, block, shared_bytes, passed, check_hazards=check_hazards, **launch_options)
    after = [_after(gpu, value, addresses.get(index)) for index, value in enumerate(args)]
    return KernelSimulation(after, run, module)


def _passed(gpu: SimulatedGPU, args: Sequence[Any], declared: Sequence[Variable]) -> tuple[list[Any], dict[int, int]]:
    """What a launch takes for each argument, and the addresses of those that are in memory."""
    passed: list[Any] = []
    addresses: dict[int, int] = {}
    of_object: dict[int, int] = {}
    for index, (value, parameter) in enumerate(zip(args, declared, strict=True)):
        if isinstance(value, (np.ndarray, Uninitialised)):
            if parameter.size != 8:
                raise ValueError(
                    f"argument {index}: an array for .{parameter.type.name} {parameter.name}, which is no pointer"
                )
            if id(value) not in of_object:
                of_object[id(value)] = (
                    gpu.to_device(value) if isinstance(value, np.ndarray) else gpu.allocate(value.nbytes)
                )
            addresses[index] = of_object[id(value)]
            passed.append(addresses[index])
        elif isinstance(value, (bool, int, float)):
            passed.append(_number(index, value, parameter))
        elif isinstance(value, (np.generic, bytes, bytearray, TensorMap)):
            passed.append(value)
        else:
            raise ValueError(
                f"argument {index}: {type(value).__name__} is not allowed; allowed: NumPy arrays and scalars, int, "
                "float, bytes, Uninitialised, TensorMap"
            )
    return passed, addresses


def _number(index: int, value: bool | int | float, parameter: Variable) -> bytes | np.generic:
    """A Python number as a parameter's type."""
    declared = parameter.type
    described = f"argument {index}: {value!r} for .{declared.name} {parameter.name}"
    if parameter.size != declared.bytes:
        raise ValueError(f"{described}, a structure of {parameter.size} bytes: pass bytes")
    if declared.kind == "f":
        return declared.dtype.type(value)
    if isinstance(value, float):
        if declared.kind == "b":
            raise ValueError(f"{described}, whose type PTX does not tell: pass a NumPy scalar")
        raise ValueError(f"{described}, which is an integer")
    if not -(1 << declared.bits - 1) <= value < 1 << declared.bits:
        raise ValueError(f"{described}: it does not fit {declared.bits} bits")
    return (int(value) & (1 << declared.bits) - 1).to_bytes(declared.bytes, "little")


def _after(gpu: SimulatedGPU, value: Any, address: int | None) -> Any:
    if address is None:
        return value
    found = gpu.to_host(address)
    return found if isinstance(value, np.ndarray) else found.view(value.dtype).reshape(value.shape)
