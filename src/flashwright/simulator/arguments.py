"""Packing launch arguments into the kernel's parameter block, checked against its declarations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flashwright.hardware.tensor_map import TensorMap

from .program import Program, align_up
from .ptx.syntax import Variable
from .tensor_maps import TensorMaps

Argument = int | bytes | bytearray | np.generic | np.ndarray | TensorMap


def pack_arguments(program: Program, arguments: Sequence[Argument], tensor_maps: TensorMaps) -> bytes:
    """The bytes a launch would put in the parameter bank; ValueError says which argument does not fit."""
    declared = program.parameters
    if len(arguments) != len(declared):
        described = ", ".join(f"{_describe(variable)}" for variable in declared)
        raise ValueError(
            f"kernel {program.name} takes {len(declared)} arguments ({described}), {len(arguments)} were given"
        )
    packed = bytearray()
    for index, (variable, argument) in enumerate(zip(declared, arguments, strict=True)):
        data = tensor_maps.encode(argument) if isinstance(argument, TensorMap) else _bytes_of(argument, variable)
        if len(data) != variable.size:
            raise ValueError(
                f"argument {index} of kernel {program.name}: {_describe(variable)} was declared, "
                f"{len(data)} bytes ({type(argument).__name__}) were given"
            )
        packed = packed.ljust(align_up(len(packed), variable.align), b"\0")
        packed += data
    return bytes(packed)


def _bytes_of(argument: Argument, variable: Variable) -> bytes:
    if isinstance(argument, (bytes, bytearray)):
        return bytes(argument)
    if isinstance(argument, (np.generic, np.ndarray)):
        return argument.tobytes()
    if isinstance(argument, int):  # a device address, or a 64-bit integer
        return (argument & (2**64 - 1)).to_bytes(8, "little")
    raise ValueError(
        f"cannot pass {type(argument).__name__} for {_describe(variable)}: use int for addresses, "
        "NumPy scalars for numbers, bytes for structures, TensorMap for tensor maps"
    )


def _describe(variable: Variable) -> str:
    if variable.type.bytes != variable.size:
        return f"{variable.size} bytes {variable.name}"
    return f".{variable.type.name} {variable.name}"
