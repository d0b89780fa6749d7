"""CUDA source to machine code by NVRTC, at run time, with no GPU, driver or toolkit; kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from flashwright.architectures import parse_arch
from flashwright.families import OLDEST, ForwardKernelConfig, family_of
from flashwright.kernel_source import KernelSource
from flashwright.occupancy import Occupancy, occupancy
from flashwright.program_cache import CachedProgram, ProgramCache
from flashwright.progress import progress_bar
from flashwright.variant import PLAIN, AttentionVariant

__all__ = [
    "CompileError",
    "CompiledProgram",
    "Kernel",
    "Occupancy",
    "compile_kernel",
    "compile_many",
    "compile_source",
    "occupancy",
]

COMPILE_OPTIONS = ("--std=c++20", "--generate-line-info", "--ptxas-options=-v")


ConfigT = TypeVar("ConfigT", bound=ForwardKernelConfig)


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
    cubin: bytes
    ptx: str
    registers: int
    spill_bytes: int
    """Bytes per thread that were stored to local memory for want of registers."""
    stack_bytes: int
    log: str
    from_cache: bool


@dataclass(frozen=True)
class Kernel(Generic[ConfigT]):
    """A forward kernel, compiled for one architecture."""

    config: ConfigT
    variant: AttentionVariant
    program: CompiledProgram
    shared_bytes: int
    """Dynamic shared memory that a launch asks for."""
    threads: int
    source: str
    """All of the device code, as one file that `nvcc` would compile too."""

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def arch(self) -> str:
        return self.program.arch

    @property
    def cubin(self) -> bytes:
        return self.program.cubin

    @property
    def ptx(self) -> str:
        return self.program.ptx

    @property
    def registers(self) -> int:
        return self.program.registers

    @property
    def spill_bytes(self) -> int:
        return self.program.spill_bytes

    @property
    def stack_bytes(self) -> int:
        return self.program.stack_bytes


def compile_kernel(
    config: ConfigT,
    arch: str = OLDEST,
    variant: AttentionVariant = PLAIN,
    *,
    cache: ProgramCache | None = None,
) -> Kernel[ConfigT]:
    """The forward kernel of a config, by default for the oldest architecture that runs it.

    Raises `ValueError` for an invalid config, `CompileError` for broken code."""
    family = family_of(config)
    source = family.source(config, variant)
    shapes = family.shapes(config)
    return Kernel(
        config=config,
        variant=variant,
        program=compile_source(source, family.target(arch), cache=cache),
        shared_bytes=shapes.shared_bytes,
        threads=shapes.threads,
        source=source.flattened(),
    )


def compile_many(
    configs: Sequence[ConfigT],
    arch: str = OLDEST,
    variant: AttentionVariant = PLAIN,
    *,
    cache: ProgramCache | None = None,
    progress: bool = True,
) -> list[Kernel[ConfigT]]:
    """The kernels of many configs, in their order, compiled on all cores with a progress bar."""
    shared_cache = cache or ProgramCache()
    workers = min(len(configs), os.cpu_count() or 1) or 1
    with (
        progress_bar(f"compiling for {arch}", len(configs), enabled=progress) as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        futures = [pool.submit(compile_kernel, config, arch, variant, cache=shared_cache) for config in configs]
        try:
            for future in as_completed(futures):
                future.result()
                advance()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def compile_source(source: KernelSource, arch: str, *, cache: ProgramCache | None = None) -> CompiledProgram:
    """Any CUDA source, compiled for an architecture or taken from the cache."""
    options = (f"--gpu-architecture={_checked_arch(arch)}", *COMPILE_OPTIONS, *source.options)
    cache = cache or ProgramCache()
    key = _cache_key(source, options)
    stored = cache.get(key)
    if stored is None:
        stored = _run_nvrtc(source, arch, options)
        cache.put(key, stored)
        from_cache = False
    else:
        from_cache = True
    facts: dict[str, Any] = dict(stored.facts)
    return CompiledProgram(
        **facts,
        arch=arch,
        cubin=stored.outputs["cubin"],
        ptx=stored.outputs["ptx"].decode(),
        from_cache=from_cache,
    )


def _checked_arch(arch: str) -> str:
    """A target that the kernels run on and the installed compiler knows."""
    known = supported_archs()
    if re.sub(r"[af]$", "", parse_arch(arch)) not in known:
        version = ".".join(map(str, nvrtc_version()))
        raise ValueError(f"arch: {arch} is not known to NVRTC {version}; known: {', '.join(known)}")
    return arch


def _cache_key(source: KernelSource, options: Sequence[str]) -> str:
    parts = [source.text, source.headers, source.name_expression, source.file_name, options, nvrtc_version()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- NVRTC -----------------------------------------------------------------------------------------------------


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise CompilerMissing(
            f"NVRTC, NVIDIA's run-time compiler, cannot be loaded ({error}); "
            "install it with: pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from error
    return nvrtc


@cache
def nvrtc_version() -> tuple[int, int]:
    """The compiler's version, e.g. (13, 0)."""
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return major, minor


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
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = _checked(
        nvrtc.nvrtcCreateProgram(source.text.encode(), source.file_name.encode(), len(names), texts, names)
    )
    try:
        expression = source.name_expression.encode()
        _checked(nvrtc.nvrtcAddNameExpression(program, expression))
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            detail = log if log.strip() else nvrtc.nvrtcGetErrorString(status)[1].decode()
            raise CompileError(source.file_name, arch, detail)
        name = _checked(nvrtc.nvrtcGetLoweredName(program, expression)).decode()
        ptx = _without_working_directory(_text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program))
        cubin = _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return CachedProgram(
        outputs={"cubin": cubin, "ptx": ptx.encode()},
        facts={"name": name, "log": log.strip(), **_resource_use(log, name)},
    )


def _bytes(size_of: Any, get: Any, program: Any) -> bytes:
    buffer = b" " * _checked(size_of(program))
    _checked(get(program, buffer))
    return buffer


def _text(size_of: Any, get: Any, program: Any) -> str:
    return _bytes(size_of, get, program).rstrip(b"\0").decode()


def _without_working_directory(ptx: str) -> str:
    """NVRTC prefixes in-memory file names with the working directory, which is no part of the program."""
    prefix = re.escape(str(Path.cwd()).rstrip("/") + "/")
    return re.sub(rf'^(\s*\.file\s+\d+\s+"){prefix}', r"\1", ptx, flags=re.MULTILINE)


def _resource_use(log: str, name: str) -> dict[str, int]:
    """Registers, spills and stack of a kernel, from the assembler's `-v` report."""
    report = log[log.rindex(f"Function properties for {name}") :]
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    registers = re.search(r"Used (\d+) registers", report)
    if frame is None or registers is None:
        raise RuntimeError(f"NVRTC's report does not name the resources of {name}:\n{log}")
    return {
        "registers": int(registers[1]),
        "spill_bytes": int(frame[2]),
        "stack_bytes": int(frame[1]),
    }
