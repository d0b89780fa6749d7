"""CUDA source to machine code by NVRTC, at run time, with no GPU, driver or toolkit; kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flashwright.compiler.program_cache import CachedProgram, ProgramCache
from flashwright.compiler.shared_work import SharedWork
from flashwright.hardware.architectures import parse_arch
from flashwright.kernels.source import KernelSource

PTX_OPTIONS = ("--std=c++20", "--generate-line-info")
COMPILE_OPTIONS = (*PTX_OPTIONS, "--ptxas-options=-v")


class CompileError(RuntimeError):
    """NVRTC refused a source. The message holds its log, which quotes the offending lines."""

    def __init__(self, name: str, arch: str, log: str) -> None:
        super().__init__(f"{name} does not compile for {arch}:\n{log.strip()}")
        self.log = log


class CompilerMissing(RuntimeError):
    """NVRTC is not installed, or cannot be loaded."""


@dataclass(frozen=True)
class CompiledProgram:
    """What NVRTC made of one source for one architecture."""

    name: str
    """The kernel's symbol."""
    arch: str
    cubin: bytes = field(repr=False)
    ptx: str = field(repr=False)
    registers: int
    spill_bytes: int
    """Bytes per thread that were stored to local memory for want of registers."""
    stack_bytes: int
    log: str = field(repr=False)
    from_cache: bool


def compile_source(source: KernelSource, arch: str, *, cache: ProgramCache | None = None) -> CompiledProgram:
    """Any CUDA source, compiled for an architecture or taken from the cache.

    Threads and processes that request the same at the same time share one compilation.
    """
    options = (f"--gpu-architecture={_checked_arch(arch)}", *COMPILE_OPTIONS, *source.options)
    cache = cache or ProgramCache()
    key = _cache_key(source, options)
    stored = cache.get(key)
    from_cache = stored is not None
    if stored is None:
        stored, from_cache = _shared.once((key, cache.directory), lambda: _compile(source, arch, options, key, cache))
    facts: dict[str, Any] = dict(stored.facts)
    return CompiledProgram(
        **facts,
        arch=arch,
        cubin=stored.outputs["cubin"],
        ptx=stored.outputs["ptx"].decode(),
        from_cache=from_cache,
    )


@dataclass(frozen=True)
class PtxProgram:
    """PTX of one source, without machine code."""

    ptx: str = field(repr=False)
    name: str | None
    """The symbol of the kernel that the source names; None if it names none."""


def compile_ptx(source: KernelSource, arch: str) -> PtxProgram:
    """Any CUDA source to PTX, with its lines, for an architecture. Nothing is cached: headers may come from disk."""
    virtual = _checked_arch(arch).replace("sm_", "compute_")
    nvrtc = _nvrtc()
    expression = source.name_expression.encode()
    with _program(source) as program:
        if expression:
            _checked(nvrtc.nvrtcAddNameExpression(program, expression))
        options = (f"--gpu-architecture={virtual}", *PTX_OPTIONS, *source.options)
        log, failure = _compile_program(program, options)
        if failure:
            raise CompileError(source.file_name, arch, log if log.strip() else failure)
        name = _checked(nvrtc.nvrtcGetLoweredName(program, expression)).decode() if expression else None
        ptx = _without_working_directory(_text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program))
    return PtxProgram(ptx, name)


def _compile(
    source: KernelSource, arch: str, options: Sequence[str], key: str, cache: ProgramCache
) -> tuple[CachedProgram, bool]:
    """The program, and whether another process has compiled it meanwhile."""
    with cache.locked(key):
        stored = cache.get(key)
        if stored is not None:
            return stored, True
        program = _run_nvrtc(source, arch, options)
        cache.put(key, program)
    return program, False


_shared = SharedWork()


def _checked_arch(arch: str) -> str:
    """A target that the kernels run on and the installed compiler knows."""
    known = supported_archs()
    if re.sub(r"[af]$", "", parse_arch(arch)) not in known:
        version = ".".join(map(str, nvrtc_version()))
        raise ValueError(f"arch: {arch} is not known to NVRTC {version}; known: {', '.join(known)}")
    return arch


def _cache_key(source: KernelSource, options: Sequence[str]) -> str:
    parts = [source.text, source.headers, source.name_expression, source.file_name, options, compiler_build()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- NVRTC -----------------------------------------------------------------------------------------------------


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        remedy = "install it with: pip install cuda-core cuda-bindings nvidia-cuda-nvrtc"
        if sys.platform == "darwin":
            remedy = "there is none for macOS: compile elsewhere, and simulate the PTX here"
        raise CompilerMissing(f"NVRTC, NVIDIA's run-time compiler, cannot be loaded ({error}); {remedy}") from error
    return nvrtc


@cache
def nvrtc_version() -> tuple[int, int]:
    """The compiler's version, e.g. (13, 0)."""
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return major, minor


def compiler_build() -> str:
    """What the compiler calls itself in its output, e.g. "CL-36424714 V13.0.88": two builds of one version differ."""
    return _shared.once("compiler build", _compiler_build)


@cache
def _compiler_build() -> str:
    # A virtual architecture stops NVRTC at PTX, without the assembler: 20 ms in a new process instead of 80.
    oldest = supported_archs()[0].replace("sm_", "compute_")
    with _program(KernelSource("", (), "", "empty.cu")) as program:
        _compile_program(program, [f"--gpu-architecture={oldest}"])
        header = _text(_nvrtc().nvrtcGetPTXSize, _nvrtc().nvrtcGetPTX, program)
    build = re.search(r"Compiler Build ID: (\S+)", header)
    version = re.search(r"\b(V\d+\.\d+\.\d+)", header)
    return " ".join(found[1] for found in (build, version) if found) or ".".join(map(str, nvrtc_version()))


@cache
def _without_driver_cache() -> tuple[str, ...]:
    """The option that keeps NVRTC from taking machine code out of the driver's own cache, where it has one.

    What comes from there has no report of the assembler, which is where registers and spills are found.
    """
    option = "--no-cache"
    oldest = supported_archs()[0].replace("sm_", "compute_")
    with _program(KernelSource("", (), "", "empty.cu")) as program:
        _, failure = _compile_program(program, [f"--gpu-architecture={oldest}", option])
    return () if failure else (option,)


@cache
def supported_archs() -> tuple[str, ...]:
    """The GPU targets that the installed NVRTC knows."""
    return tuple(f"sm_{number}" for number in _checked(_nvrtc().nvrtcGetSupportedArchs()))


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != _nvrtc().nvrtcResult.NVRTC_SUCCESS:
        message = _nvrtc().nvrtcGetErrorString(status)[1].decode()
        raise RuntimeError(f"NVRTC: {message}")
    return values[0] if len(values) == 1 else values


def _run_nvrtc(source: KernelSource, arch: str, options: Sequence[str]) -> CachedProgram:
    nvrtc = _nvrtc()
    expression = source.name_expression.encode()
    with _program(source) as program:
        _checked(nvrtc.nvrtcAddNameExpression(program, expression))
        log, failure = _compile_program(program, (*options, *_without_driver_cache()))
        if failure:
            raise CompileError(source.file_name, arch, log if log.strip() else failure)
        name = _checked(nvrtc.nvrtcGetLoweredName(program, expression)).decode()
        ptx = _without_working_directory(_text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program))
        cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    return CachedProgram(
        outputs={"cubin": cubin, "ptx": ptx.encode()},
        facts={"name": name, "log": log.strip(), **_resource_use(log, name)},
    )


@contextmanager
def _program(source: KernelSource) -> Iterator[Any]:
    nvrtc = _nvrtc()
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = _checked(
        nvrtc.nvrtcCreateProgram(source.text.encode(), source.file_name.encode(), len(names), texts, names)
    )
    try:
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _compile_program(program: Any, options: Sequence[str]) -> tuple[str, str]:
    """The compiler's log, and what it calls its failure; the latter is empty if there was none."""
    nvrtc = _nvrtc()
    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status == nvrtc.nvrtcResult.NVRTC_SUCCESS:
        return log, ""
    return log, nvrtc.nvrtcGetErrorString(status)[1].decode()


def _bytes(size_of: Any, get: Any, program: Any) -> bytes:
    # Mutable: Python shares short `bytes` objects, and what NVRTC wrote into one would change all of them.
    buffer = bytearray(_checked(size_of(program)))
    _checked(get(program, buffer))
    return bytes(buffer)


def _text(size_of: Any, get: Any, program: Any) -> str:
    return _bytes(size_of, get, program).rstrip(b"\0").decode()


def _without_working_directory(ptx: str) -> str:
    """NVRTC prefixes in-memory file names with the working directory, which is no part of the program."""
    prefix = re.escape(str(Path.cwd()).rstrip("/") + "/")
    return re.sub(rf'^(\s*\.file\s+\d+\s+"){prefix}', r"\1", ptx, flags=re.MULTILINE)


def _resource_use(log: str, name: str) -> dict[str, int]:
    """Registers, spills and stack of a kernel, from the assembler's `-v` report."""
    report = log[max(0, log.rfind(f"Function properties for {name}")) :]
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    registers = re.search(r"Used (\d+) registers", report)
    if frame is None or registers is None:
        raise RuntimeError(f"NVRTC's report does not name the resources of {name}:\n{log}")
    return {
        "registers": int(registers[1]),
        "spill_bytes": int(frame[2]),
        "stack_bytes": int(frame[1]),
    }
