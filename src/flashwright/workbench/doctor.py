"""What flashwright needs of a machine: what was found, what is missing, and what to do about it.

Nothing here changes the machine, apart from a file that is written to the cache directory and removed again.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from flashwright.compiler.nvrtc import compile_source, nvrtc_version
from flashwright.compiler.program_cache import (
    CACHE_DIRECTORY_VARIABLE,
    CachedProgram,
    ProgramCache,
    cache_directory,
    why_untrusted,
)
from flashwright.compiler.toolkit import toolkit_include_directories
from flashwright.kernels.source import KernelSource
from flashwright.runtime.devices import OLDEST_COMPUTE_CAPABILITY
from flashwright.workbench import environment
from flashwright.workbench.explain.disassembly import find_disassembler

OLDEST_PYTHON = (3, 10)
LITTLE_DISK_BYTES = 1024**3
_TINY = KernelSource("__global__ void nothing() {}\n", (), "nothing", "doctor.cu")


class Verdict(Enum):
    OK = "ok"
    NOTE = "note"
    """Something optional is missing."""
    BROKEN = "broken"
    """Flashwright does not work until this is repaired."""


@dataclass(frozen=True)
class Finding:
    subject: str
    verdict: Verdict
    found: str
    advice: str | None = None
    """What to do, if anything."""
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "verdict": self.verdict.value,
            "found": self.found,
            "advice": self.advice,
            "facts": self.facts,
        }


def findings() -> Iterator[Finding]:
    """One after the other, as they are found. A check that fails unexpectedly is a finding too."""
    checks: dict[str, Callable[[], Finding]] = {
        "Python": check_python,
        "flashwright": check_flashwright,
        "CUDA bindings": check_bindings,
        "NVRTC": check_nvrtc,
        "disassembler": check_disassembler,
        "CUDA headers": check_headers,
        "driver": check_driver,
        "GPU": check_gpu,
        "PyTorch": check_torch,
        "transformers": check_transformers,
        "program cache": check_cache,
        "tuning database": check_tuning,
        "disk": check_disk,
    }
    for subject, check in checks.items():
        try:
            yield check()
        except Exception as error:
            yield Finding(subject, Verdict.NOTE, f"could not be examined: {_text_of(error)}")


def works(found: Iterable[Finding]) -> bool:
    """Whether flashwright can work here, with a GPU or without."""
    return all(finding.verdict is not Verdict.BROKEN for finding in found)


# --- Python and packages -------------------------------------------------------------------------------------------


def check_python() -> Finding:
    facts = {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()}
    found = f"{facts['version']} at {sys.executable}"
    if sys.version_info >= OLDEST_PYTHON:
        return Finding("Python", Verdict.OK, found, facts=facts)
    needed = ".".join(map(str, OLDEST_PYTHON))
    return Finding("Python", Verdict.BROKEN, found, f"install Python {needed} or later", facts)


def check_flashwright() -> Finding:
    version, place = environment.flashwright_version(), str(Path(__file__).parents[1])
    return Finding("flashwright", Verdict.OK, f"{version} at {place}", facts={"version": version, "path": place})


def check_bindings() -> Finding:
    versions = {name: environment.package_version(name) for name in ("cuda-core", "cuda-bindings")}
    found = ", ".join(f"{name} {version or 'of unknown version'}" for name, version in versions.items())
    return Finding("CUDA bindings", Verdict.OK, found, facts=versions)


def check_nvrtc() -> Finding:
    package = environment.package_version("nvidia-cuda-nvrtc")
    facts: dict[str, Any] = {"package": package, "version": None, "compile_seconds": None}
    advice = "pip install --force-reinstall 'nvidia-cuda-nvrtc>=13.0,<14' 'cuda-bindings>=13.0,<14'"
    try:
        facts["version"] = ".".join(map(str, nvrtc_version()))
        with tempfile.TemporaryDirectory() as empty:
            start = time.perf_counter()
            compile_source(_TINY, "sm_80", cache=ProgramCache(Path(empty) / "cache"))
            facts["compile_seconds"] = round(time.perf_counter() - start, 3)
    except Exception as error:
        which = f"NVRTC {facts['version']} does not compile" if facts["version"] else "NVRTC cannot be loaded"
        return Finding("NVRTC", Verdict.BROKEN, f"{which}: {_text_of(error)}", advice, facts)
    source = f"package nvidia-cuda-nvrtc {package}" if package else "not from the package nvidia-cuda-nvrtc"
    seconds = facts["compile_seconds"]
    return Finding(
        "NVRTC", Verdict.OK, f"{facts['version']} ({source}); compiles a small kernel in {seconds:.2f} s", facts=facts
    )


def check_disassembler() -> Finding:
    tool = find_disassembler()
    facts = {"path": None if tool is None else str(tool)}
    if tool is None:
        advice = "only for machine code in `flashwright explain` and `compare`: pip install nvidia-cuda-nvdisasm"
        return Finding("disassembler", Verdict.NOTE, "no nvdisasm (optional)", advice, facts)
    return Finding("disassembler", Verdict.OK, str(tool), facts=facts)


def check_headers() -> Finding:
    found = toolkit_include_directories()
    facts = {"path": str(found[0]) if found else None}
    if not found:
        advice = (
            "only for kernels of your own that include cuda_fp16.h, mma.h and the like: "
            "pip install 'flashwright[headers]'"
        )
        return Finding("CUDA headers", Verdict.NOTE, "none (optional)", advice, facts)
    return Finding("CUDA headers", Verdict.OK, str(found[0]), facts=facts)


def check_transformers() -> Finding:
    version = environment.package_version("transformers")
    facts = {"version": version}
    if version is None:
        advice = "only for its attn_implementation: pip install 'flashwright[transformers]'"
        return Finding("transformers", Verdict.NOTE, "not installed (optional)", advice, facts)
    return Finding("transformers", Verdict.OK, version, facts=facts)


# --- The GPU -------------------------------------------------------------------------------------------------------


def check_driver() -> Finding:
    version, cuda = environment.driver_version(), environment.driver_cuda_version()
    facts = {"version": version, "cuda": cuda}
    if version is None and cuda is None:
        advice = "none needed for the simulator; to run on a GPU, install NVIDIA's driver 580 or later"
        return Finding("driver", Verdict.NOTE, "no CUDA driver", advice, facts)
    supports = f"supports CUDA {cuda[0]}.{cuda[1]}" if cuda else "its library libcuda cannot be loaded"
    found = f"{version or 'unknown version'}, {supports}"
    if cuda is None:
        advice = "install the driver's user libraries (libcuda.so.1); in a container, run it with --gpus all"
        return Finding("driver", Verdict.NOTE, found, advice, facts)
    compiler = environment.nvrtc_version_text()
    if compiler is not None and cuda[0] < int(compiler.partition(".")[0]):
        advice = f"kernels compiled by NVRTC {compiler} may not load; update the driver to 580 or later"
        return Finding("driver", Verdict.NOTE, found, advice, facts)
    return Finding("driver", Verdict.OK, found, facts=facts)


def check_gpu() -> Finding:
    gpus = environment.gpus()
    supported = [gpu.compute_capability >= OLDEST_COMPUTE_CAPABILITY for gpu in gpus]
    facts = {"gpus": [asdict(gpu) | {"supported": runs} for gpu, runs in zip(gpus, supported, strict=True)]}
    if not gpus:
        advice = "none needed for `flashwright ladder`, `simulate` and `explain`; kernels run on the simulator"
        return Finding("GPU", Verdict.NOTE, "none visible", advice, facts)
    found = "; ".join(
        f"{gpu.name}, compute capability {'.'.join(map(str, gpu.compute_capability))}, {_size_text(gpu.memory_bytes)}"
        for gpu in gpus
    )
    if not any(supported):
        needed = ".".join(map(str, OLDEST_COMPUTE_CAPABILITY))
        advice = f"the kernels need compute capability {needed} (Ampere) or later; the simulator works without"
        return Finding("GPU", Verdict.NOTE, found, advice, facts)
    return Finding("GPU", Verdict.OK, found, facts=facts)


def check_torch() -> Finding:
    facts: dict[str, Any] = {"version": None, "cuda": None, "sees_gpu": False}
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        found = "not installed" if missing else f"cannot be imported: {_text_of(error)}"
        advice = "to run on a GPU: pip install 'flashwright[torch]'"
        return Finding("PyTorch", Verdict.NOTE, found, advice, facts)
    except Exception as error:  # a broken installation may raise anything
        advice = "reinstall it: pip install --force-reinstall torch"
        return Finding("PyTorch", Verdict.NOTE, f"cannot be imported: {_text_of(error)}", advice, facts)
    facts |= {"version": torch.__version__, "cuda": torch.version.cuda, "sees_gpu": torch.cuda.is_available()}
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__}, {build}, {'sees' if facts['sees_gpu'] else 'sees no'} GPU"
    if facts["sees_gpu"] or not environment.gpus():
        return Finding("PyTorch", Verdict.OK, found, facts=facts)
    if torch.version.cuda is None:
        advice = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
    else:
        advice = "the driver sees a GPU that PyTorch does not: python -c 'import torch; torch.cuda.init()' says why"
    return Finding("PyTorch", Verdict.NOTE, found, advice, facts)


# --- What is kept on disk ------------------------------------------------------------------------------------------


def check_cache() -> Finding:
    directory = cache_directory()
    facts: dict[str, Any] = {"path": str(directory), "exists": directory.is_dir(), "writable": False}
    advice = f"export {CACHE_DIRECTORY_VARIABLE}=DIRECTORY, naming a directory of your own that can be written"
    try:
        _write_probe(directory)
    except OSError as error:
        return Finding("program cache", Verdict.BROKEN, f"{directory} cannot be written: {error}", advice, facts)
    facts["writable"] = True
    if not facts["exists"]:
        return Finding("program cache", Verdict.OK, f"{directory}, made on first use", facts=facts)
    facts |= _cache_content(directory)
    found = f"{directory}: {facts['entries']} programs, {_size_text(facts['bytes'])}"
    programs = directory / "programs"
    if programs.is_dir() and (reason := why_untrusted(programs)) is not None:
        return Finding("program cache", Verdict.BROKEN, f"{found}; it is not used, for {reason}", advice, facts)
    facts["private"] = _is_private(directory) or _is_private(programs)
    if not facts["private"]:
        private = f"chmod 700 {programs}"
        return Finding("program cache", Verdict.NOTE, f"{found}; others may open {programs}", private, facts)
    if facts["corrupt"]:
        damaged = f"{found}; {len(facts['corrupt'])} of them damaged"
        return Finding("program cache", Verdict.NOTE, damaged, "nothing: they are compiled anew when needed", facts)
    return Finding("program cache", Verdict.OK, f"{found}, private", facts=facts)


def _write_probe(directory: Path) -> None:
    """Raises OSError unless a file can be made in the directory, or in what it would be made in."""
    place = directory if directory.exists() else _nearest_existing(directory)
    if not place.is_dir():
        raise NotADirectoryError(f"{place} is not a directory")
    with tempfile.TemporaryFile(dir=place) as probe:
        probe.write(b"flashwright doctor")


def _is_private(directory: Path) -> bool:
    """Whether only its owner can open a directory, or it is not there yet and will be made so."""
    return os.name != "posix" or not directory.exists() or not directory.stat().st_mode & 0o077


def _cache_content(directory: Path) -> dict[str, Any]:
    entries = [path for path in (directory / "programs" / "entries").rglob("*") if path.is_file()]
    corrupt, size = [], 0
    for path in entries:
        try:
            data = path.read_bytes()
        except OSError:  # evicted by another process in the meantime
            continue
        size += len(data)
        if CachedProgram.from_bytes(data) is None:
            corrupt.append(str(path))
    return {"entries": len(entries), "bytes": size, "corrupt": corrupt}


def check_tuning() -> Finding:
    from flashwright.choice.database import TuningDatabase

    status = TuningDatabase().status().to_dict()
    path, state = status["path"], status["state"]
    if state == "absent":
        return Finding("tuning database", Verdict.OK, f"{path}: {status['detail']}", facts=status)
    if state == "usable":
        found = f"{path}: {status['results']} results, {status['unfinished_searches']} unfinished searches"
        return Finding("tuning database", Verdict.OK, found, facts=status)
    found = f"{path} is {state} ({status['detail']}); attention() uses the configs that come with flashwright"
    return Finding("tuning database", Verdict.NOTE, found, _TUNING_ADVICE.get(state), status)


_TUNING_ADVICE = {
    "damaged": "flashwright tune, which sets the file aside and makes a new one",
    "newer": "pip install --upgrade flashwright",
    "unusable": f"export {CACHE_DIRECTORY_VARIABLE}=DIRECTORY, naming a directory of your own that can be written",
}


def check_disk() -> Finding:
    place = _nearest_existing(cache_directory())
    free = shutil.disk_usage(place).free
    found, facts = f"{_size_text(free)} free at {place}", {"path": str(place), "free_bytes": free}
    if free >= LITTLE_DISK_BYTES:
        return Finding("disk", Verdict.OK, found, facts=facts)
    advice = f"free some, or set {CACHE_DIRECTORY_VARIABLE} to a directory on a larger disk"
    return Finding("disk", Verdict.NOTE, found, advice, facts)


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _size_text(size: int) -> str:
    return f"{size / 1024**3:.1f} GiB" if size >= 1024**3 else f"{size / 1024**2:.1f} MiB"


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
