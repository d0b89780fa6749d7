"""Compiled programs on disk, in a directory that is the user's alone; only what was made here is changed here.

`cuda.core`'s file cache stores and evicts the entries (atomic writes, safe between processes). Each entry carries
a checksum of its content: one that does not match is treated as absent, and is overwritten by the next compilation.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

try:
    from cuda.core.utils import FileStreamProgramCache
except ImportError:  # as on macOS, where there is no compiler either
    FileStreamProgramCache = None

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


def make_private(directory: Path) -> None:
    """Makes a directory that only its owner can open. One that is there already stays as it is."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory in missing:
        directory.chmod(0o700)  # the umask may have taken bits away, a parent's access list may have added some


def why_untrusted(directory: Path) -> str | None:
    """What keeps programs in a directory from being run as they are found; None if only its owner can put them there.

    A directory that others could write to is shielded by one above it that they cannot open.
    """
    if not hasattr(os, "getuid"):
        return None
    found = directory.stat()
    if found.st_uid != os.getuid():
        return f"{directory} belongs to another user"
    shielded = not directory.parent.stat().st_mode & 0o011
    if found.st_mode & 0o022 and not shielded:
        return f"others may write to {directory}"
    return None


def _check_owner(directory: Path) -> None:
    if (reason := why_untrusted(directory)) is not None:
        raise PermissionError(reason)


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
        self.directory = directory or cache_directory()
        self._programs = self.directory / "programs"
        self._locks = self.directory / "locks"
        self._store = self._open()

    def _open(self) -> FileStreamProgramCache | None:
        try:
            make_private(self.directory)
            for own in (self._programs, self._locks):
                make_private(own)
                _check_owner(own)
            if FileStreamProgramCache is None:
                return None
            return FileStreamProgramCache(self._programs, max_size_bytes=MAX_CACHE_BYTES)
        except OSError as error:
            self._warn("opened", error)
            return None

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Keeps other processes from compiling the same at the same time, where the file system has locks."""
        try:
            import fcntl
        except ImportError:  # no such locks on this platform: each process compiles for itself
            fcntl = None  # type: ignore[assignment]
        if self._store is None or fcntl is None:
            yield
            return
        try:
            file = (self._locks / f"{key}.lock").open("a")
        except OSError:
            yield
            return
        with file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                with suppress(OSError):
                    Path(file.name).unlink()

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
            f"the program cache {self.directory} cannot be {verb} ({error}); kernels are compiled anew. "
            f"Set {CACHE_DIRECTORY_VARIABLE} to a directory of your own to use another.",
            RuntimeWarning,
            stacklevel=4,
        )
