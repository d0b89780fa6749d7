"""The kernels that run before and after a family's own backward kernel, over blocks of query rows."""

from __future__ import annotations

from typing import Any

from flashwright.kernels.source import SPECIALISATION_HEADER, Constant, KernelSource, device_headers, specialisation

ROW_KERNEL_THREADS = 128


def rows_source(config: Any, constants: dict[str, dict[str, Constant]]) -> KernelSource:
    """Before: log-sum-exps and dot products of each row; sums of dQ at zero."""
    return _source(config, constants, "backward_rows_kernel<0>")


def dq_source(config: Any, constants: dict[str, dict[str, Constant]]) -> KernelSource:
    """After: dQ from its sums."""
    return _source(config, constants, "backward_dq_kernel<0>")


def _source(config: Any, constants: dict[str, dict[str, Constant]], name: str) -> KernelSource:
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "backward/rows.cuh"\n',
        headers=((SPECIALISATION_HEADER, specialisation(config, constants)), *device_headers()),
        name_expression=name,
        file_name="backward_rows.cu",
    )
