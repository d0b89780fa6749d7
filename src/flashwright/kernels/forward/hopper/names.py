"""A Hopper config from its short form, or from the C++ name of its kernel."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from flashwright.kernels.forward.hopper.config import OPTIONS, HopperForwardKernelConfig
from flashwright.kernels.forward.hopper.space import get_hopper_configs
from flashwright.kernels.naming import mangled_fields, nearest_hint, parse_cpp_fields
from flashwright.problem.dtypes import DType

_FIELDS_NEVER_ZERO = 5

_SHORT_FORM = re.compile(r"hopper\s*\(\s*(\w+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)\s*:\s*(\S+)", re.IGNORECASE)
_CPP_STRUCT = re.compile(r"HopperForwardKernelConfig\s*\{([^{}]*)\}")


def parse_hopper_config(text: str) -> HopperForwardKernelConfig:
    """The config named by a short form, or by a C++ kernel name with `HopperForwardKernelConfig{…}`, mangled or not."""
    if match := _CPP_STRUCT.search(text):
        return parse_cpp_fields(HopperForwardKernelConfig, match[1], _FIELDS_NEVER_ZERO)
    if members := mangled_fields(HopperForwardKernelConfig, text):
        return parse_cpp_fields(HopperForwardKernelConfig, members, _FIELDS_NEVER_ZERO)
    if match := _SHORT_FORM.fullmatch(text.strip()):
        dtype, d_head, B_r, B_c, options = match.groups()
        return HopperForwardKernelConfig(
            DType.parse(dtype), int(d_head), int(B_r), int(B_c), **_parse_options(options, text)
        )
    raise ValueError(
        f"{text!r} names no Hopper kernel; expected a short form such as "
        "'hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy+guess+first' "
        f"or a C++ name containing 'HopperForwardKernelConfig{{…}}', mangled or not"
        f"{nearest_hint(text.strip(), _known_short_forms())}"
    )


def _parse_options(options: str, text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for token in options.lower().split("+"):
        if token in OPTIONS:
            name, value = OPTIONS[token], 1
        elif match := re.fullmatch(r"stages_(\d+)", token):
            name, value = "kv_stages", int(match[1])
        else:
            raise ValueError(
                f"unknown option {token!r} in {text!r}; allowed: stages_N, {', '.join(OPTIONS)}"
                f"{nearest_hint(token, ('stages_2', *OPTIONS))}"
            )
        if name in values:
            raise ValueError(f"option {token!r} is given twice in {text!r}")
        values[name] = value
    if "kv_stages" not in values:
        raise ValueError(f"{text!r} does not say how many K/V stages there are; expected an option stages_N")
    return values


@cache
def _known_short_forms() -> list[str]:
    return [config.short_form() for config in get_hopper_configs()]
