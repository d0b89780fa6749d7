"""PTX as users have it: text, bytes or a file; what is no PTX is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

from .lexer import PtxSyntaxError

PtxSource = str | bytes | bytearray | os.PathLike[str]

# First bytes of what compilers leave beside PTX.
_BINARIES = {
    b"\x7fELF": "a cubin or an object file (ELF)",
    b"\x50\xed\x55\xba": "a fat binary",
    b"!<arch>": "a library",
    b"BC\xc0\xde": "LLVM bitcode",
    b"PK": "an archive",
}


def read_ptx(source: PtxSource) -> str:
    """The text of a PTX module; a `str` of one line that ends in `.ptx` is the path of a file.

    PtxSyntaxError says what a file holds that is no PTX; OSError, that it cannot be read.
    """
    if isinstance(source, (bytes, bytearray)):
        return _decoded(bytes(source), "the PTX")
    if isinstance(source, os.PathLike) or (source.endswith(".ptx") and "\n" not in source):
        return _decoded(Path(source).read_bytes(), str(source))
    return _checked(source, "the PTX")


def _decoded(data: bytes, name: str) -> str:
    for magic, what in _BINARIES.items():
        if data.startswith(magic):
            raise PtxSyntaxError(f"{name} is {what}, not PTX text; expected the output of nvcc --ptx or of NVRTC")
    data = data.rstrip(b"\0")  # compilers end the text as C does
    if b"\0" in data:
        raise PtxSyntaxError(f"{name} is binary (byte {data.index(0):,} is zero), not PTX text")
    try:
        return _checked(data.decode("utf-8"), name)
    except UnicodeDecodeError as error:
        raise PtxSyntaxError(f"{name} is not PTX text: byte {error.start:,} is not UTF-8") from None


def _checked(text: str, name: str) -> str:
    text = text.rstrip("\0")
    if not text.strip():
        raise PtxSyntaxError(f"{name} is empty")
    return text
