"""An Ampere decode config from its short form, or from the C++ name of its kernel."""

from __future__ import annotations

import re

from flashwright.kernels.decode.ampere.config import OPTIONS, AmpereDecodeKernelConfig
from flashwright.kernels.naming import mangled_fields, nearest_hint, parse_cpp_fields

_SIZES = r",\s*(\d+)\s*" * 4
_SHORT_FORM = re.compile(
    rf"ampere\s+decode\s*\(\s*(\w+)\s*{_SIZES}\)\s*:\s*rows_(\d+)\+stages_(\d+)((?:\+\w+)*)", re.IGNORECASE
)
_CPP_STRUCT = re.compile(r"AmpereDecodeKernelConfig\s*\{([^{}]*)\}")
_FIELDS_NEVER_ZERO = 7


def parse_ampere_decode_config(text: str) -> AmpereDecodeKernelConfig:
    """The config named by a short form, or by a C++ kernel name, mangled or not."""
    if match := _CPP_STRUCT.search(text):
        return parse_cpp_fields(AmpereDecodeKernelConfig, match[1], _FIELDS_NEVER_ZERO)
    if members := mangled_fields(AmpereDecodeKernelConfig, text):
        return parse_cpp_fields(AmpereDecodeKernelConfig, members, _FIELDS_NEVER_ZERO)
    if match := _SHORT_FORM.fullmatch(text.strip()):
        dtype, *sizes, options = match.groups()
        given = options.split("+")[1:]
        for token in given:
            if token not in OPTIONS:
                raise ValueError(
                    f"unknown option {token!r} in {text!r}; allowed: {', '.join(OPTIONS)}{nearest_hint(token, OPTIONS)}"
                )
        switches = {name: token in given for token, name in OPTIONS.items()}
        return AmpereDecodeKernelConfig(dtype, *map(int, sizes), **switches)  # type: ignore[arg-type]
    raise ValueError(
        f"{text!r} names no kernel; expected a short form such as "
        "'ampere decode (BF16, 128, 16, 16, 8): rows_1+stages_2+swizzled' "
        "or a C++ name containing 'AmpereDecodeKernelConfig{…}', mangled or not"
    )
