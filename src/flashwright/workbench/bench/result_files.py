"""Result files: JSON documents that say what they are, written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any


class ResultFileError(ValueError):
    """A file is not a result of the expected kind."""


def check_destination(path: Path) -> None:
    """Raises, before any work is done, if the file cannot be written."""
    directory = path.absolute().parent
    if path.is_dir():
        raise ResultFileError(f"{path} is a directory; give the name of a file")
    if not directory.is_dir():
        raise ResultFileError(f"{path} cannot be written: the directory {directory} does not exist")
    if _is_written_into(path):
        if not os.access(path, os.W_OK):
            raise ResultFileError(f"{path} cannot be written: {os.strerror(errno.EACCES)}")
        return
    try:
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ResultFileError(f"{path} cannot be written: {error.strerror or error}") from error


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file in one step: a reader, or an interruption, finds the old content or the new. A device, a pipe or
    what a link leads to is written into."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if _is_written_into(path):
            path.write_bytes(content)
        else:
            temporary.write_bytes(content)
            temporary.replace(path)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _is_written_into(path: Path) -> bool:
    """What a new file must not take the place of."""
    return path.exists() and (path.is_symlink() or not path.is_file())


def write_document(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text.encode() + b"\n")


def read_document(path: Path, *, holding: str, made_by: str) -> dict[str, Any]:
    """The document of a file, which must have a list under the key `holding`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of UTF-8 or of JSON
        raise ResultFileError(f"{path} is damaged or incomplete: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get(holding), list):
        raise ResultFileError(f"{path} is not a result of `{made_by}`: it has no list of {holding!r}")
    return document


def parsed_entries(path: Path, document: dict[str, Any], holding: str, parse: Any) -> list[Any]:
    """Every entry of a document's list, parsed; an entry that cannot be is named by its number."""
    entries = []
    for number, values in enumerate(document[holding], start=1):
        try:
            entries.append(parse(values))
        except KeyError as error:
            raise ResultFileError(f"{path}: entry {number} of {holding!r} lacks {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ResultFileError(f"{path}: entry {number} of {holding!r} is damaged: {error}") from error
    return entries
