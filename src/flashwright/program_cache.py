"""Compiled programs on disk, in a directory that is the user's alone.

`cuda.core`'s file cache stores and evicts the entries (atomic writes, safe between processes). Each entry carries
a checksum of its content: one that does not match is treated as absent, and is overwritten by the next compilation.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cuda.core.utils import FileStreamProgramCache

CACHE_DIRECTORY_VARIABLE = "FLASHWRIGHT_CACHE_DIR"
MAX_CACHE_BYTES = 2 * 1024**3
_MAGIC = b"flashwright-program-1\n"


def cache_directory() -> Path:
    """Where programs are kept: `$FLASHWRIGHT_CACHE_DIR`, or the platform's cache directory."""
    if chosen := os.environ.get(CACHE_DIRECTORY_VARIABLE):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flashwright"


@dataclass(frozen=True)
class CachedProgram:
    """A compiler's outputs under names, and facts about them that JSON can hold."""

    outputs: Mapping[str, bytes]
    facts: Mapping[str, object]

    def to_bytes(self) -> bytes:
        header = {
            "facts": dict(self.facts),
            "sizes": {name: len(data) for name, data in self.outputs.items()},
        }
        content = json.dumps(header).encode() + b"\n" + b"".join(self.outputs.values())
        return _MAGIC + hashlib.sha256(content).hexdigest().encode() + b"\n" + content

    @classmethod
    def from_bytes(cls, data: bytes) -> CachedProgram | None:
        """The program, or None if the bytes are not exactly what `to_bytes` made."""
        if not data.startswith(_MAGIC):
            return None
        checksum, _, content = data[len(_MAGIC) :].partition(b"\n")
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            return None
        header_text, _, body = content.partition(b"\n")
        header = json.loads(header_text)
        outputs, start = {}, 0
        for name, size in header["sizes"].items():
            outputs[name] = body[start : start + size]
            start += size
        return cls(outputs, header["facts"])


class ProgramCache:
    """A cache that never fails a compilation: an unusable directory means recompiling, with one warning."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or cache_directory()
        self._store = self._open()

    def _open(self) -> FileStreamProgramCache | None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if hasattr(os, "getuid"):
                owner = self._directory.stat()
                if owner.st_uid != os.getuid():
                    raise PermissionError("it belongs to another user")
                if owner.st_mode & 0o077:
                    self._directory.chmod(0o700)
            return FileStreamProgramCache(self._directory / "programs", max_size_bytes=MAX_CACHE_BYTES)
        except OSError as error:
            self._warn("opened", error)
            return None

    def get(self, key: str) -> CachedProgram | None:
        """The program stored under a key; None if there is none, or it is damaged."""
        if self._store is None:
            return None
        try:
            data = self._store.get(key)
        except OSError as error:
            self._warn("read", error)
            return None
        return CachedProgram.from_bytes(data) if data is not None else None

    def put(self, key: str, program: CachedProgram) -> None:
        if self._store is None:
            return
        try:
            self._store[key] = program.to_bytes()
        except OSError as error:
            self._warn("written", error)

    def _warn(self, verb: str, error: OSError) -> None:
        warnings.warn(
            f"the program cache {self._directory} cannot be {verb} ({error}); kernels are compiled anew. "
            f"Set {CACHE_DIRECTORY_VARIABLE} to a directory of your own to use another.",
            RuntimeWarning,
            stacklevel=4,
        )
