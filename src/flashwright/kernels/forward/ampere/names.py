"""An Ampere config from its short form, or from the C++ name of its kernel."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from typing import Any

from flashwright.kernels.forward.ampere.combinations import AUTOTUNED_D_HEADS, combinations
from flashwright.kernels.forward.ampere.config import NUMBERED_OPTIONS, OPTION_FIELDS, FlashForwardKernelConfig
from flashwright.kernels.forward.ampere.ladder import get_kernel_progression_configs
from flashwright.kernels.naming import mangled_fields, nearest_hint, parse_cpp_fields
from flashwright.problem.dtypes import DType

_FIELDS_NEVER_ZERO = 5
_SHORT_FORM = re.compile(r"\(\s*(\w+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)\s*:\s*(\S+)")
_CPP_STRUCT = re.compile(r"FlashForwardKernelConfig\s*\{([^{}]*)\}")


def parse_kernel_name_into_config(text: str) -> FlashForwardKernelConfig:
    """The config named by a short form, or by a C++ kernel name with `FlashForwardKernelConfig{…}`, mangled or not."""
    if match := _CPP_STRUCT.search(text):
        return parse_cpp_fields(FlashForwardKernelConfig, match[1], _FIELDS_NEVER_ZERO)
    if members := mangled_fields(FlashForwardKernelConfig, text):
        return parse_cpp_fields(FlashForwardKernelConfig, members, _FIELDS_NEVER_ZERO)
    if match := _SHORT_FORM.fullmatch(text.strip()):
        dtype, *sizes, options = match.groups()
        d_head, B_r, B_c, n_warps = map(int, sizes)
        return FlashForwardKernelConfig(
            dtype=DType.parse(dtype), d_head=d_head, B_r=B_r, B_c=B_c, n_warps=n_warps, **_parse_options(options, text)
        )
    raise ValueError(
        f"{text!r} names no kernel; expected a short form such as "
        "'(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax' "
        f"or a C++ name containing 'FlashForwardKernelConfig{{…}}', mangled or not"
        f"{nearest_hint(text.strip(), _known_short_forms())}"
    )


def _parse_options(options: str, text: str) -> dict[str, Any]:
    values: dict[str, Any] = dict.fromkeys(OPTION_FIELDS.values(), False)
    seen: set[str] = set()
    for token in options.lower().split("+"):
        kind = token
        if token in OPTION_FIELDS:
            values[OPTION_FIELDS[token]] = True
        elif match := re.fullmatch(r"load_(\d+)_(\d+)_(\d+)_tiles", token):
            kind = "load_…_tiles"
            for operand, tiles in zip("QKV", match.groups(), strict=True):
                values[f"{operand}_mma_load_K_tiles"] = int(tiles)
        elif (match := re.fullmatch(r"(\w+)_(\d+)", token)) and match[1] in NUMBERED_OPTIONS:
            kind = f"{match[1]}_…"
            values[NUMBERED_OPTIONS[match[1]]] = int(match[2])
        else:
            raise ValueError(
                f"unknown option {token!r} in {text!r}; allowed: {', '.join(OPTION_FIELDS)}, "
                f"load_Q_K_V_tiles, {', '.join(f'{option}_N' for option in NUMBERED_OPTIONS)}"
                f"{nearest_hint(token, (*OPTION_FIELDS, 'load_2_2_2_tiles', 'stride_2048', 'ring_3'))}"
            )
        if kind in seen:
            raise ValueError(f"option {kind!r} is given twice in {text!r}")
        seen.add(kind)
    if "load_…_tiles" not in seen:
        raise ValueError(f"{text!r} does not say how operands are loaded; expected an option load_Q_K_V_tiles")
    return values


@cache
def _known_short_forms() -> list[str]:
    found = [config.short_form() for config in get_kernel_progression_configs()]
    for dtype, d_head in product(DType, AUTOTUNED_D_HEADS):
        found += [config.short_form() for config, reason in combinations(dtype, d_head) if reason is None]
    return found
