"""A user's kernels as they are given, CUDA C++ or PTX, text or file; and the PTX that the simulator gets."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashwright.compiler.nvrtc import CompileError, compile_ptx
from flashwright.compiler.toolkit import toolkit_include_directories
from flashwright.hardware.architectures import ARCHITECTURES
from flashwright.kernels.source import KernelSource
from flashwright.simulation.system_headers import HEADERS, missing_header_hint
from flashwright.simulator.ptx.source import read_ptx

Source = str | bytes | os.PathLike[str]
CUDA_SUFFIXES = (".cu", ".cuh")
PTX_SUFFIX = ".ptx"
DEFAULT_ARCH = "sm_80"
HOST_CODE_HINT = "NVRTC compiles device code alone. Of a file with host code, make PTX: nvcc --ptx -lineinfo."


@dataclass(frozen=True)
class UserModule:
    """The PTX of a user's kernels, where it came from, and the architecture it is simulated on."""

    ptx: str
    arch: str
    name: str
    cuda: str | None
    """The CUDA source; None of PTX."""
    kernel: str | None
    """The symbol of the kernel that was requested as a C++ expression."""


def user_module(
    source: Source,
    *,
    arch: str | None = None,
    kernel: str | None = None,
    include: Sequence[str | os.PathLike[str]] = (),
    options: Sequence[str] = (),
) -> UserModule:
    """The PTX of a source. CUDA C++ is compiled by NVRTC, for ``arch``, with the headers of C, and the toolkit's where
    they are installed.

    ``kernel`` may be a C++ expression (`scale<float, 4>`), which instantiates a template.
    """
    if not isinstance(source, (str, bytes, os.PathLike)):
        raise TypeError(f"source: expected CUDA C++ or PTX, or the path of such a file, got {type(source).__name__}")
    path = _path_of(source)
    name = "kernel.cu" if path is None else _shown(path)
    content = source if path is None else path.read_bytes()
    assert isinstance(content, (str, bytes))  # a path that is no text was read
    if not is_cuda(source):
        if include or options:
            raise ValueError("include directories and compiler options are for CUDA sources; this is PTX")
        ptx = read_ptx(content if path is None else path)
        return UserModule(ptx, arch or _target_of(ptx), name, None, None)
    arch = arch or DEFAULT_ARCH
    cuda = _decoded(content, name)
    directories = [Path(directory) for directory in include]
    for directory in directories:
        if not directory.is_dir():
            raise ValueError(f"include: there is no directory {directory}")
    beside = [] if path is None else [path.parent]
    searched = [*beside, *directories, HEADERS, *toolkit_include_directories()]
    expression = kernel if kernel and is_expression(kernel) else ""
    # Warnings, most of them about the toolkit's own headers, would bury the errors. nvcc knows __int128 unasked.
    flags = (
        "--disable-warnings",
        "--device-int128",
        *(f"--include-path={directory}" for directory in searched),
        *options,
    )
    try:
        program = compile_ptx(KernelSource(cuda, (), expression, name, flags), arch)
    except CompileError as error:
        hints = [missing_header_hint(error.log), HOST_CODE_HINT if "JIT mode" in error.log else None]
        raise CompileError(name, arch, "\n".join([error.log.strip(), *filter(None, hints)])) from None
    return UserModule(program.ptx, arch, name, cuda, program.name)


def _shown(path: Path) -> str:
    """A file's name in line information and reports: relative to the working directory, if it is below that."""
    working = Path.cwd()
    return str(path.relative_to(working) if path.is_relative_to(working) else path)


def is_expression(kernel: str) -> bool:
    """Whether a kernel is given in C++, so that the compiler has to find it."""
    return re.search(r"[<(:]", kernel) is not None


def _decoded(content: str | bytes, name: str) -> str:
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not CUDA source: byte {error.start:,} is not UTF-8") from None
    if not text.strip():
        raise ValueError(f"{name} is empty")
    return text


def is_cuda(source: Source) -> bool:
    """Whether a source is CUDA C++: a file of that kind, or text that does not begin as PTX does."""
    path = _path_of(source)
    if path is not None:
        return path.suffix in CUDA_SUFFIXES
    text = source.decode("utf-8", "replace") if isinstance(source, bytes) else str(source)
    return re.search(r"^\s*\.version\s", text, re.MULTILINE) is None and "__global__" in text


def _path_of(source: Source) -> Path | None:
    """The file that a source names; None if it is the text itself."""
    if isinstance(source, os.PathLike):
        path = Path(source)
        if path.suffix not in (*CUDA_SUFFIXES, PTX_SUFFIX):
            raise ValueError(f"{path}: files of kernels end in {', '.join((*CUDA_SUFFIXES, PTX_SUFFIX))}")
        return path
    if isinstance(source, str) and "\n" not in source and source.endswith((*CUDA_SUFFIXES, PTX_SUFFIX)):
        return Path(source)
    return None


def _target_of(ptx: str) -> str:
    """The architecture that PTX was compiled for, if the simulator knows it."""
    target = re.search(r"^\s*\.target\s+(sm_\d+[af]?)", ptx, re.MULTILINE)
    is_known = target is not None and re.sub(r"[af]$", "", target[1]) in ARCHITECTURES
    return target[1] if target is not None and is_known else DEFAULT_ARCH
