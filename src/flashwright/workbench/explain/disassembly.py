"""Machine code as text, where NVIDIA's disassembler is installed: on the PATH, or inside a Python package."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

NOT_FOUND = (
    "no nvdisasm found on the PATH or in the Python packages nvidia-cuda-nvdisasm and triton; "
    "install it with: pip install nvidia-cuda-nvdisasm"
)
TIMEOUT_SECONDS = 60
_PLACES_IN_PACKAGES = {"nvidia": "*/bin/nvdisasm", "triton": "backends/nvidia/bin/nvdisasm"}


class DisassemblyError(RuntimeError):
    """There is no disassembler, or it refused the cubin; the message says which."""


def find_disassembler() -> Path | None:
    """`nvdisasm`, if this machine has one that may be executed."""
    on_path = shutil.which("nvdisasm")
    if on_path is not None:
        return Path(on_path)
    return next((path for path in _in_packages() if os.access(path, os.X_OK)), None)


def _in_packages() -> Iterator[Path]:
    for package, place in _PLACES_IN_PACKAGES.items():
        spec = find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted(Path(root).glob(place))


def disassemble(cubin: bytes, *, with_source_lines: bool = False) -> str:
    """The machine code of a cubin as `nvdisasm -c` prints it, on request with the source lines before instructions."""
    tool = find_disassembler()
    if tool is None:
        raise DisassemblyError(NOT_FOUND)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        try:
            result = subprocess.run(
                [tool, "-c", *(("-gi",) if with_source_lines else ()), path],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DisassemblyError(f"{tool} cannot be run: {error}") from error
    if result.returncode:
        detail = (result.stderr or result.stdout).strip().splitlines()
        raise DisassemblyError(f"{tool} failed: {detail[-1] if detail else f'exit status {result.returncode}'}")
    return result.stdout
