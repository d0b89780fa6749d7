"""Configs from their short forms, `prefix (dtype, sizes): numbers+options`, or from the C++ names of their kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flashwright.kernels.naming import ConfigT, mangled_fields, nearest_hint, parse_cpp_fields


def config_parser(
    config_type: Callable[..., ConfigT],
    prefix: str,
    numbers: str,
    options: Mapping[str, str],
    example: str,
    *,
    sizes: int = 4,
) -> Callable[[str], ConfigT]:
    """Reads configs whose fields are a dtype, so many sizes, the groups of the expression `numbers`, and switches, by
    their names in short forms: `options`."""
    type_name = config_type.__name__
    size_list = r",\s*(\d+)\s*" * sizes
    words = r"\s+".join(prefix.split())
    short_form = re.compile(rf"{words}\s*\(\s*(\w+)\s*{size_list}\)\s*:\s*{numbers}((?:\+\w+)*)", re.IGNORECASE)
    cpp_struct = re.compile(rf"{type_name}\s*\{{([^{{}}]*)\}}")
    never_zero = short_form.groups - 1  # all fields but the switches

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
        for token in given:
            if token not in options:
                raise ValueError(
                    f"unknown option {token!r} in {text!r}; allowed: {', '.join(options)}{nearest_hint(token, options)}"
                )
            if given.count(token) > 1:
                raise ValueError(f"option {token!r} is given twice in {text!r}")
        return {name: token in given for token, name in options.items()}

    return parse
