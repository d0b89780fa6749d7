"""Whether two kernels are the same to the GPU, whatever their configs say."""

from __future__ import annotations

import hashlib
import struct

_SECTION_TABLE_OFFSET, _SECTION_COUNTS_OFFSET = 0x28, 0x3A
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


def machine_code(cubin: bytes) -> bytes:
    """The instructions of a cubin's kernel: the ELF section `.text.…`, without the names around it."""
    (table,) = struct.unpack_from("<Q", cubin, _SECTION_TABLE_OFFSET)
    size, count, names_index = struct.unpack_from("<HHH", cubin, _SECTION_COUNTS_OFFSET)
    headers = [_SECTION_HEADER.unpack_from(cubin, table + index * size) for index in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, length, *_ in headers:
        if cubin.startswith(b".text.", names + name):
            return cubin[offset : offset + length]
    raise ValueError("the cubin holds no kernel")


def digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:16]
