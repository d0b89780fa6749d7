"""What the lines of a kernel's source are about, by the markers at their ends: `// @key value`.

`@operand Q`: a wait for, a copy of, or a release of that operand's block. `@product S`: what computes that product.
`@phase softmax`: a part of a KV step. Names in the source may change; markers say what is meant.
"""

from __future__ import annotations

import re
from functools import cache

from flashwright.kernels.source import KernelSource
from flashwright.simulator.ptx.syntax import SourceLocation

OPERAND, PRODUCT, PHASE = "operand", "product", "phase"
_COMMENT = re.compile(r"//(?P<text>.*@.*)$")
_MARKER = re.compile(r"@(?P<key>\w+) (?P<value>[^@]*[^@\s])")


class Markers:
    """The markers of one kernel's source."""

    def __init__(self, source: KernelSource) -> None:
        self._texts = {**dict(source.headers), source.file_name: source.text}

    def value(self, place: SourceLocation | None, key: str) -> str | None:
        """What the first line with such a marker says, from the innermost inlined line outwards; None: no line has."""
        while place is not None:
            text = self._texts.get(place.file)
            value = None if text is None else _marked_lines(text).get((place.line, key))
            if value is not None:
                return value
            place = place.inlined_at
        return None


@cache
def _marked_lines(text: str) -> dict[tuple[int, str], str]:
    """By line, from 1, and key."""
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if comment := _COMMENT.search(line):
            for marker in _MARKER.finditer(comment["text"]):
                found[number, marker["key"]] = marker["value"]
    return found
