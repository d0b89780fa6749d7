"""Arguments of a kernel as text: numbers, files, ranges, random and other new data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from flashwright.simulation import Uninitialised

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
ARGUMENT_HELP = (
    "An argument, in order. A number: TYPE:VALUE (i32:7, f32:0.5). A pointer to data: FILE.npy, or TYPE:FILE.npy to "
    "convert it; zeros:TYPE:SIZE, ones:…, random:…; range:TYPE:STOP or range:TYPE:START:STOP[:STEP]; empty:TYPE:SIZE "
    "without content. SIZE is a number or a shape, as 64x128. A structure: bytes:HEX."
)
_LARGEST_RANDOM_INTEGER = 100


def parse_arguments(texts: Sequence[str], seed: int = 0) -> list[Any]:
    """What `simulate_kernel` takes for arguments such as `random:f32:1024`, `x.npy` or `i32:7`.

    Random numbers are standard normal, or integers from 0 to 99; no two arguments have the same ones.
    """
    generator = np.random.default_rng(seed)
    return [parse_argument(text, generator) for text in texts]


def parse_argument(text: str, generator: np.random.Generator, option: str = "--arg") -> Any:
    """One of them; ``option`` is named in the ValueError for what is none."""
    try:
        value = _parsed(text, generator)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{option}: {text!r}: {error}") from error
    if value is None:
        raise ValueError(
            f"{option}: {text!r} is not an argument; expected TYPE:VALUE, FILE.npy, zeros:TYPE:SIZE, ones:TYPE:SIZE, "
            "random:TYPE:SIZE, empty:TYPE:SIZE, range:TYPE:START:STOP or bytes:HEX, with TYPE one of "
            f"{', '.join(ARGUMENT_TYPES)}"
        )
    return value


def _parsed(text: str, generator: np.random.Generator) -> Any:
    if text.endswith(".npy"):
        return _from_file(text)
    match text.split(":"):
        case [("zeros" | "ones" | "random" | "empty") as fill, type_name, size] if type_name in ARGUMENT_TYPES:
            return _filled(fill, ARGUMENT_TYPES[type_name], _shape(size), generator)
        case ["range", type_name, *limits] if type_name in ARGUMENT_TYPES and 1 <= len(limits) <= 3:
            return np.arange(*(_number(limit) for limit in limits)).astype(ARGUMENT_TYPES[type_name])
        case ["bytes", digits]:
            return _bytes(digits)
        case [type_name, value] if type_name in ARGUMENT_TYPES:
            return _scalar(ARGUMENT_TYPES[type_name], value)
    return None


def _from_file(text: str) -> np.ndarray:
    type_name, _, path = text.rpartition(":")
    if type_name not in ARGUMENT_TYPES:
        type_name, path = "", text
    array = np.load(Path(path))
    dtype = ARGUMENT_TYPES.get(type_name)
    if array.dtype.kind == "V":  # a type that NumPy does not know, as bfloat16, is saved as plain bytes
        if dtype is None or dtype.itemsize != array.dtype.itemsize:
            raise ValueError(f"its type is not NumPy's: name it, as bf16:{path}")
        return array.view(dtype)
    if array.dtype.hasobject:
        raise ValueError("it holds Python objects")
    return array if dtype is None else array.astype(dtype)


def _filled(fill: str, dtype: np.dtype[Any], shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    if fill == "empty":
        return Uninitialised(shape, dtype)
    if fill != "random":
        return np.zeros(shape, dtype) if fill == "zeros" else np.ones(shape, dtype)
    if dtype.kind in "iu":
        return generator.integers(0, _LARGEST_RANDOM_INTEGER, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)


def _bytes(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise ValueError("expected two hexadecimal digits for every byte") from None


def _scalar(dtype: np.dtype[Any], text: str) -> Any:
    # Python reads the number: ml_dtypes crashes on text that is none.
    try:
        return dtype.type(int(text, 0) if dtype.kind in "iu" else float(text))
    except ValueError:
        raise ValueError(f"{text!r} is no number of type {dtype}") from None


def _shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", text):
        raise ValueError(f"{text!r} is not a size; expected a number, or a shape as 64x128")
    return tuple(int(size) for size in text.split("x"))


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
