"""What the simulator's tests share: compiling CUDA C with NVRTC, and running single PTX instructions on arrays."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

DTYPES = {
    "u8": np.uint8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32, "s32": np.int32, "u64": np.uint64,
    "s64": np.int64, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "f16": np.float16, "f32": np.float32,
    "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16x2": np.uint32, "bf16x2": np.uint32, "s8": np.int8,
}  # fmt: skip


@cache
def compile_cuda(source: str, arch: str = "sm_80", *more_options: str) -> str:
    """PTX of CUDA C, with line information; ``more_options`` are for the compiler."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], [])
    options = [f"--gpu-architecture=compute_{arch[3:]}".encode(), b"-lineinfo", b"--std=c++17"]
    options += [option.encode() for option in more_options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    return text.decode().rstrip("\0")


def launch(
    ptx: str,
    block: int,
    outputs: dict[str, np.ndarray],
    *inputs: object,
    grid: int = 1,
    shared_bytes: int = 0,
    kernel: str | None = None,
    arch: str = "sm_80",
    **options: object,
) -> Run:
    """Run a kernel whose parameters are the outputs, then the inputs (arrays become pointers); updates outputs."""
    gpu = SimulatedGPU(arch)
    module = gpu.load(ptx)
    pointers = {name: gpu.to_device(array) for name, array in outputs.items()}
    arguments = [gpu.to_device(item) if isinstance(item, np.ndarray) and item.ndim else item for item in inputs]
    run = module.launch(
        kernel or module.kernels[0], (grid,), (block,), shared_bytes, [*pointers.values(), *arguments], **options
    )
    for name, pointer in pointers.items():
        outputs[name][...] = gpu.to_host(pointer)
    return run


HEADER = ".version 8.5\n.target sm_90\n.address_size 64\n"
THREADS = 64


@cache
def _instruction_module(body: str, result: str, operands: tuple[str, ...]) -> object:
    return SimulatedGPU("sm_90").load(instruction_ptx(body, result, operands))


def instruction_ptx(body: str, result: str, operands: tuple[str, ...]) -> str:
    """A kernel that applies ``body`` (registers %d, %a, %b, …) to one element per thread."""
    names = "abcdefg"[: len(operands)]
    parameters = ", ".join(f".param .u64 p_{name}" for name in "z" + names)
    lines = [f".visible .entry k({parameters})", "{", ".reg .b64 %rd<4>; .reg .b32 %r<4>; .reg .pred %p<4>;"]
    lines.append(f".reg {_register(result)} %d;")
    lines += [f".reg {_register(t)} %{n};" for n, t in zip(names, operands, strict=True)]
    lines.append("mov.u32 %r0, %tid.x;")
    for name, operand in zip(names, operands, strict=True):
        lines += [*_address(f"p_{name}", operand), f"ld.global.{_bits(operand)} %{name}, [%rd1];"]
    lines += [body, *_address("p_z", result), f"st.global.{_bits(result)} [%rd1], %d;", "ret;", "}"]
    return HEADER + "\n".join(lines)


def _register(name: str) -> str:
    return f".b{max(16, np.dtype(DTYPES[name]).itemsize * 8)}"


def _bits(name: str) -> str:
    return f"b{np.dtype(DTYPES[name]).itemsize * 8}"


def _address(parameter: str, name: str) -> list[str]:
    size = np.dtype(DTYPES[name]).itemsize
    return [f"ld.param.u64 %rd0, [{parameter}];", f"mad.wide.u32 %rd1, %r0, {size}, %rd0;"]


def apply(body: str, result: str, *operands: tuple[str, object]) -> np.ndarray:
    """Values of ``body`` for arrays (or lists) of operands, at most 64 elements."""
    module = _instruction_module(body, result, tuple(name for name, _ in operands))
    values, pointers = apply_on(module._gpu, module, result, *operands)  # type: ignore[attr-defined]
    for pointer in pointers:
        module._gpu.free(pointer)  # type: ignore[attr-defined]
    return values


def apply_on(gpu: Any, module: Any, result: str, *operands: tuple[str, object]) -> tuple[np.ndarray, list[int]]:
    """The same on any GPU that has loaded the instruction's kernel; also what was allocated."""
    arrays = [np.asarray(values, DTYPES[name]) for name, values in operands]
    count = arrays[0].size
    pointers = [gpu.to_device(np.zeros(THREADS, DTYPES[result]))]
    for array in arrays:
        padded = np.zeros(THREADS, array.dtype)
        padded[:count] = array
        pointers.append(gpu.to_device(padded))
    module.launch("k", 1, THREADS, 0, pointers)
    return gpu.to_host(pointers[0])[:count], pointers


# Reference rounding: (precision in bits, smallest exponent, largest finite value) -----------------------------
FORMATS = {
    "f16": (11, -14, Fraction(65504)),
    "bf16": (8, -126, Fraction(255 * 2**120)),
    "f32": (24, -126, Fraction((2**24 - 1) * 2**104)),
    "f64": (53, -1022, Fraction((2**53 - 1) * 2**971)),
}


def rounded(value: Fraction, name: str, mode: str = "rn") -> float:
    """A rational number rounded to a format, in exact arithmetic."""
    precision, smallest, largest = FORMATS[name]
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    ulp = Fraction(2) ** (max(exponent, smallest) - precision + 1)
    quotient = value / ulp
    below = quotient.numerator // quotient.denominator
    rest = quotient - below
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and below % 2 == 1),
        "rz": rest > 0 and value < 0,
        "rm": False,
        "rp": rest > 0,
    }[mode]
    result = (below + up) * ulp
    if abs(result) > largest:
        toward_zero = mode == "rz" or (mode == "rm" and value > 0) or (mode == "rp" and value < 0)
        return float(largest if toward_zero else np.inf) * (1 if value > 0 else -1)
    return float(result)
