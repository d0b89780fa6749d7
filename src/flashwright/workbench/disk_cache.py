"""What flashwright keeps on disk: compiled programs and parsed modules, which are made again when they are needed, and
tuning results, which are not and stay when the rest is cleared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashwright.choice.database import FILE_NAME
from flashwright.compiler.program_cache import CachedProgram, cache_directory
from flashwright.kernels.registry import parse_config

PROGRAMS, MODULES = "programs", "simulator"
CLEARED = {PROGRAMS: "compiled programs", MODULES: "parsed modules"}
"""By directory."""


@dataclass(frozen=True)
class CachePart:
    kind: str
    path: Path
    files: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"path": str(self.path)}


@dataclass(frozen=True)
class StoredProgram:
    kernel: str
    """The short form of its config, or the kernel's symbol if it is not one of ours."""
    arch: str
    registers: int | None
    bytes: int
    written: str
    """UTC."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parts(directory: Path | None = None) -> list[CachePart]:
    """How much there is of each kind."""
    directory = directory or cache_directory()
    kinds = {directory / name: what for name, what in CLEARED.items()} | {directory / FILE_NAME: "tuning results"}
    return [_part(what, path) for path, what in kinds.items()]


def programs(directory: Path | None = None) -> list[StoredProgram]:
    """The last written first. Damaged ones are left out: they are compiled anew when they are needed."""
    found = []
    for file, size in _files((directory or cache_directory()) / PROGRAMS):
        with suppress(OSError):
            program = CachedProgram.from_bytes(file.read_bytes())
            if program is not None:
                found.append(_stored(program, size, file.stat().st_mtime))
    return sorted(found, key=lambda program: program.written, reverse=True)


def clear(directory: Path | None = None) -> list[CachePart]:
    """Removes what is made again when it is needed; returns how much there was of each kind.

    Directories stay, so that processes at work go on: they compile what they miss.
    """
    directory = directory or cache_directory()
    cleared = [part for part in parts(directory) if part.path.name in CLEARED]
    for part in cleared:
        for file, _ in _files(part.path):
            file.unlink(missing_ok=True)
    return cleared


def _part(kind: str, path: Path) -> CachePart:
    sizes = [size for _, size in _files(path)]
    return CachePart(kind, path, len(sizes), sum(sizes))


def _files(path: Path) -> Iterator[tuple[Path, int]]:
    """Files and their sizes; those that another process removes meanwhile are left out."""
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        with suppress(OSError):
            if file.is_file():
                yield file, file.stat().st_size


def _stored(program: CachedProgram, size: int, written: float) -> StoredProgram:
    symbol, registers = str(program.facts.get("name", "?")), program.facts.get("registers")
    target = re.search(rb"^\.target\s+(\w+)", program.outputs.get("ptx", b""), re.MULTILINE)
    return StoredProgram(
        kernel=_config_of(symbol) or symbol,
        arch=target[1].decode() if target else "?",
        registers=registers if isinstance(registers, int) else None,
        bytes=size,
        written=datetime.fromtimestamp(written, timezone.utc).isoformat(timespec="seconds"),
    )


def _config_of(symbol: str) -> str | None:
    try:
        return str(parse_config(symbol).short_form())
    except ValueError:
        return None
