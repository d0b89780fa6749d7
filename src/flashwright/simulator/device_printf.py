"""The text of a `printf` on the device: C's format strings, with arguments packed as `vprintf` gets them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?(?P<size>hh|h|ll|l|j|z|t|L)?(?P<kind>.)",
    re.DOTALL,
)
_INTEGERS, _FLOATS = "diouxX", "eEfFgGaA"
_BITS = {"hh": 8, "h": 16, None: 32}  # of an integer; of all other sizes 64

Reader = Callable[[int, int], bytes]  # (offset in the packed arguments, size)
Strings = Callable[[int], str]  # the string at an address


class _Arguments:
    """Arguments one after the other, each aligned to its size."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._offset = 0
        self.count = 0

    def next(self, code: str) -> int | float:
        size = struct.calcsize(code)
        offset = -(-self._offset // size) * size
        self._offset = offset + size
        self.count += 1
        value: int | float = struct.unpack(f"<{code}", self._read(offset, size))[0]
        return value


def formatted(text: str, read: Reader, string_at: Strings) -> tuple[str, int]:
    """What is printed, and the number of arguments it took. Conversions that do not exist are printed as they stand."""
    arguments = _Arguments(read)
    return _CONVERSION.sub(lambda found: _convert(found, arguments, string_at), text), arguments.count


def _convert(found: re.Match[str], arguments: _Arguments, string_at: Strings) -> str:
    kind = found["kind"]
    if kind == "%":
        return "%"
    if kind not in _INTEGERS + _FLOATS + "csp":
        return found[0]
    width, precision = (
        str(arguments.next("i")) if item == "*" else item for item in (found["width"], found["precision"])
    )
    form = f"%{found['flags']}{width}" + ("" if precision is None else f".{precision}")
    if kind == "s":
        return (form + "s") % string_at(int(arguments.next("Q")))
    if kind == "c":
        return (form + "c") % chr(int(arguments.next("i")) & 0xFF)
    if kind == "p":
        return (form + "s") % hex(int(arguments.next("Q")))
    if kind in "aA":
        value = float(arguments.next("d")).hex()
        return (form + "s") % (value.upper() if kind == "A" else value)
    if kind in _FLOATS:
        return (form + kind) % arguments.next("d")
    return _integer(form, kind, _BITS.get(found["size"], 64), arguments)


def _integer(form: str, kind: str, bits: int, arguments: _Arguments) -> str:
    value = int(arguments.next("q" if bits == 64 else "i")) & ((1 << bits) - 1)
    if kind in "di" and value >> (bits - 1):
        value -= 1 << bits
    if kind == "o" and "#" in form:
        return (form.replace("#", "") + "s") % f"0{value:o}"
    return (form + kind) % value
