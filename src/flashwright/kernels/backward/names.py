"""Backward configs from their short forms, or from the C++ names of their kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from flashwright.kernels.naming import ConfigT, mangled_fields, nearest_hint, parse_cpp_fields

_FIELDS_NEVER_ZERO = 7
"""All but those that are on or off."""


def backward_parser(
    config_type: Callable[..., ConfigT], family: str, options: Mapping[str, str], example: str
) -> Callable[[str], ConfigT]:
    """Reads configs whose short forms are `family backward (dtype, four sizes): stages_Q_dO+options`."""
    type_name = config_type.__name__
    sizes = r",\s*(\d+)\s*" * 4
    short_form = re.compile(
        rf"{family}\s+backward\s*\(\s*(\w+)\s*{sizes}\)\s*:\s*stages_(\d+)_(\d+)((?:\+\w+)*)", re.IGNORECASE
    )
    cpp_struct = re.compile(rf"{type_name}\s*\{{([^{{}}]*)\}}")

    def parse(text: str) -> ConfigT:
        if match := cpp_struct.search(text):
            return parse_cpp_fields(config_type, match[1], _FIELDS_NEVER_ZERO)
        if members := mangled_fields(config_type, text):  # type: ignore[arg-type]
            return parse_cpp_fields(config_type, members, _FIELDS_NEVER_ZERO)
        if match := short_form.fullmatch(text.strip()):
            dtype, *sizes, given = match.groups()
            return config_type(dtype, *map(int, sizes), **_switches(given.split("+")[1:], text))
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
