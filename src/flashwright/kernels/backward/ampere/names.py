"""An Ampere backward config from its short form, or from the C++ name of its kernel."""

from __future__ import annotations

import re

from flashwright.kernels.backward.ampere.config import OPTIONS, AmpereBackwardKernelConfig
from flashwright.kernels.naming import mangled_fields, nearest_hint, parse_cpp_fields

_SHORT_FORM = re.compile(
    r"ampere\s+backward\s*\(\s*(\w+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)\s*:"
    r"\s*stages_(\d+)_(\d+)((?:\+\w+)*)",
    re.IGNORECASE,
)
_CPP_STRUCT = re.compile(r"AmpereBackwardKernelConfig\s*\{([^{}]*)\}")
_FIELDS_NEVER_ZERO = 7


def parse_ampere_backward_config(text: str) -> AmpereBackwardKernelConfig:
    """The config named by a short form, or by a C++ kernel name, mangled or not."""
    if match := _CPP_STRUCT.search(text):
        return parse_cpp_fields(AmpereBackwardKernelConfig, match[1], _FIELDS_NEVER_ZERO)
    if members := mangled_fields(AmpereBackwardKernelConfig, text):
        return parse_cpp_fields(AmpereBackwardKernelConfig, members, _FIELDS_NEVER_ZERO)
    if match := _SHORT_FORM.fullmatch(text.strip()):
        dtype, *sizes, options = match.groups()
        given = options.split("+")[1:]
        for token in given:
            if token not in OPTIONS:
                raise ValueError(
                    f"unknown option {token!r} in {text!r}; allowed: {', '.join(OPTIONS)}{nearest_hint(token, OPTIONS)}"
                )
            if given.count(token) > 1:
                raise ValueError(f"option {token!r} is given twice in {text!r}")
        switches = {name: token in given for token, name in OPTIONS.items()}
        return AmpereBackwardKernelConfig(dtype, *map(int, sizes), **switches)  # type: ignore[arg-type]
    raise ValueError(
        f"{text!r} names no kernel; expected a short form such as "
        "'ampere backward (BF16, 128, 64, 128, 8): stages_2_1+swizzled' "
        "or a C++ name containing 'AmpereBackwardKernelConfig{…}', mangled or not"
    )
