"""Kernels by the names that their authors gave them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def plain_name(symbol: str) -> str:
    """`saxpy` of `_Z5saxpyfPf`, `ns::k` of `_ZN2ns1kEPi`: a C++ name without its types; other symbols as they are."""
    mangled = re.match(r"_Z(N?)", symbol)
    if mangled is None:
        return symbol
    position, parts = mangled.end(), []
    while length := re.match(r"L?(\d+)", symbol[position:]):
        start = position + length.end()
        position = start + int(length[1])
        parts.append(symbol[start:position])
        if not mangled[1]:
            break
    return "::".join(parts) or symbol


def find_kernel(kernels: Sequence[str], wanted: str | None) -> str:
    """The symbol of a kernel by its symbol or plain name; None: of the only one. ValueError lists what there is."""
    listed = ", ".join(dict.fromkeys(plain_name(kernel) for kernel in kernels)) or "none"
    if wanted is None:
        if len(kernels) != 1:
            raise ValueError(f"kernel: there are {len(kernels)} kernels; choose one of: {listed}")
        return kernels[0]
    if wanted in kernels:
        return wanted
    found = [kernel for kernel in kernels if plain_name(kernel) == wanted or plain_name(kernel).endswith(f"::{wanted}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"kernel: {wanted!r} is overloaded or a template; choose one of: {', '.join(found)}")
    raise ValueError(f"kernel: there is no {wanted!r}; there is: {listed}")
