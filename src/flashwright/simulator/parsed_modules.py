"""Parsed PTX modules, kept in this process and on disk: parsing is half of loading, and loading outlasts most runs.

An entry on disk is a checksum and the pickled syntax tree. Entries appear as a whole (written beside, then renamed) and
are read only from a directory that nobody but the user can write to; what does not match its checksum, or holds
anything but a syntax tree, is parsed anew and replaced. The cache never fails a load.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import os
import pickle
import tempfile
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from flashwright.compiler.program_cache import cache_directory, make_private, why_untrusted

from .ptx import parser, syntax, types

MAX_CACHE_BYTES = 256 << 20
# Shorter modules are parsed in less time than it takes to open a file.
_MIN_CHARACTERS = 20_000
_MAGIC = b"flashwright-ptx-1\n"


@lru_cache(maxsize=16)
def parsed(text: str) -> syntax.ModuleSyntax:
    """The syntax tree of a PTX module, shared by all that load it; nobody may change it."""
    if len(text) < _MIN_CHARACTERS:
        return parser.parse(text)
    store = SyntaxStore(cache_directory() / "simulator")
    key = hashlib.sha256((_parser_digest() + text).encode()).hexdigest()
    found = store.get(key)
    if found is None:
        found = parser.parse(text)
        store.put(key, found)
    return found


@cache
def _parser_digest() -> str:
    """Trees of another version of the parser are of no use."""
    files = sorted(Path(parser.__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class SyntaxStore:
    """Syntax trees in a directory; whatever is wrong with the directory, there is just nothing in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def get(self, key: str) -> syntax.ModuleSyntax | None:
        """The tree stored under a key; None if there is none, or it is damaged."""
        path = self._path(key)
        with suppress(OSError):
            if why_untrusted(self.directory) is None:
                found = _from_bytes(path.read_bytes())
                os.utime(path)  # the eldest by use are removed first
                return found
        return None

    def put(self, key: str, tree: syntax.ModuleSyntax) -> None:
        with suppress(OSError):
            make_private(self.directory)
            if why_untrusted(self.directory) is not None:
                return
            with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".new-", delete=False) as file:
                try:
                    file.write(_to_bytes(tree))
                    file.close()
                    Path(file.name).replace(self._path(key))
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise
            self._prune()

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.ptx-syntax"

    def _prune(self) -> None:
        """Remove the entries used least recently, until the rest fits."""
        entries = sorted(
            ((path.stat(), path) for path in self.directory.iterdir()), key=lambda entry: -entry[0].st_mtime
        )
        total = 0
        for stat, path in entries:
            total += stat.st_size
            if total > MAX_CACHE_BYTES:
                path.unlink(missing_ok=True)


def _to_bytes(tree: syntax.ModuleSyntax) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {types.PtxType: lambda value: (ptx_type, (value.name,))}
    pickler.dump(tree)
    content = buffer.getvalue()
    return _MAGIC + hashlib.sha256(content).digest() + content


def _from_bytes(data: bytes) -> syntax.ModuleSyntax | None:
    """The tree, or None if the bytes are not what `_to_bytes` made."""
    header = len(_MAGIC) + hashlib.sha256().digest_size
    content = data[header:]
    if data[:header] != _MAGIC + hashlib.sha256(content).digest():
        return None
    try:
        tree = _SyntaxUnpickler(io.BytesIO(content)).load()
    except Exception:  # whatever an entry of unknown origin may hold
        return None
    return tree if isinstance(tree, syntax.ModuleSyntax) else None


def ptx_type(name: str) -> types.PtxType:
    """A type by its name: there is one object of each."""
    return types.TYPES[name]


class _SyntaxUnpickler(pickle.Unpickler):
    """Makes nothing but syntax trees, whatever a file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == ptx_type.__name__:
            return ptx_type
        found = getattr(syntax, name, None) if module == syntax.__name__ else None
        if isinstance(found, type):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a syntax tree")
