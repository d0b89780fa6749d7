"""Configs from their short forms, `prefix (dtype, sizes): numbers+options`, or from the C++ names of their kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flashwright.kernels.naming import ConfigT, mangled_fields, nearest_hint, parse_cpp_fields

_NO_COUNTS: Mapping[str, str] = {}


def config_parser(
    config_type: Callable[..., ConfigT],
    prefix: str,
    numbers: str,
    options: Mapping[str, str],
    example: str,
    counts: Mapping[str, str] = _NO_COUNTS,
    *,
    sizes: int = 4,
) -> Callable[[str], ConfigT]:
    """Reads configs whose fields are a dtype, so many sizes, the groups of the expression `numbers`, counts, and
    switches, by their names in short forms: `counts`, with a number behind the name and 1 where they are left out, and
    `options`."""
    type_name = config_type.__name__
    allowed = (*(f"{token}_N" for token in counts), *options)
    size_list = r",\s*(\d+)\s*" * sizes
    words = r"\s+".join(prefix.split())
    short_form = re.compile(rf"{words}\s*\(\s*(\w+)\s*{size_list}\)\s*:\s*{numbers}((?:\+\w+)*)", re.IGNORECASE)
    cpp_struct = re.compile(rf"{type_name}\s*\{{([^{{}}]*)\}}")
    never_zero = short_form.groups - 1 + len(counts)  # all fields but the switches

    def parse(text: str) -> ConfigT:
        if match := cpp_struct.search(text):
            return parse_cpp_fields(config_type, match[1], never_zero)
        if members := mangled_fields(config_type, text):  # type: ignore[arg-type]
            return parse_cpp_fields(config_type, members, never_zero)
        if match := short_form.fullmatch(text.strip()):
            dtype, *values, given = match.groups()
            return config_type(dtype, *map(int, values), **_switches(given.split("+")[1:], text))
        raise ValueError(
            f"{text!r} names no kernel; expected a short form such as {example!r} or a C++ name containing "
            f"'{type_name}{{…}}', mangled or not"
        )

    def _switches(given: list[str], text: str) -> dict[str, Any]:
        values: dict[str, Any] = dict.fromkeys(options.values(), False)
        seen = set()
        for token in given:
            count = re.fullmatch(r"(\w+)_(\d+)", token)
            name = count[1] if count and count[1] in counts else token
            if name not in options and not (count and name in counts):
                raise ValueError(
                    f"unknown option {token!r} in {text!r}; allowed: {', '.join(allowed)}{nearest_hint(token, allowed)}"
                )
            if name in seen:
                raise ValueError(f"option {name!r} is given twice in {text!r}")
            seen.add(name)
            if name in options:
                values[options[name]] = True
            elif count:
                values[counts[name]] = int(count[2])
        return values

    return parse
