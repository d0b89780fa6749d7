"""New keys and values into a cache, and rotary embeddings: what runs before a decode, where it is requested."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from flashwright.kernels.decode.launch import DecodeArguments, DecodeLaunch
from flashwright.kernels.launch import Grid
from flashwright.kernels.source import (
    SPECIALISATION_HEADER,
    Constant,
    KernelSource,
    device_headers,
    specialisation,
)
from flashwright.kernels.tensors import DeviceTensor, TensorView, check_layout

APPEND = "append"
"""The companion of a decode kernel that runs before it."""
APPEND_THREADS = 128
ROTARY_STEP = 16
"""Columns that are rotated come in multiples of so many."""


class AppendJob(ctypes.Structure):
    """`AppendJob` of append.cuh."""

    _fields_ = (
        ("source", TensorView),
        ("target", TensorView),
        ("heads", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("rotates", ctypes.c_int32),
        ("into_cache", ctypes.c_int32),
        ("advances", ctypes.c_int32),
        ("columns", ctypes.c_int32),
    )


class AppendArguments(ctypes.Structure):
    """`AppendArguments` of append.cuh."""

    _fields_ = (
        ("decode", DecodeArguments),
        ("jobs", AppendJob * 3),
        ("cosines", ctypes.c_uint64),
        ("sines", ctypes.c_uint64),
        ("rotary_columns", ctypes.c_int32),
        ("rotary_positions", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Rotary:
    """Tables of (positions, columns / 2) cosines and sines, of the tensors' dtype, contiguous."""

    cosines_address: int
    sines_address: int
    positions: int
    columns: int
    interleaved: bool


@dataclass(frozen=True)
class AppendLaunch:
    grid: Grid
    arguments: AppendArguments


def append_launch(
    decode: DecodeLaunch,
    k_cache: DeviceTensor,
    v_cache: DeviceTensor,
    *,
    k: DeviceTensor | None = None,
    v: DeviceTensor | None = None,
    q: DeviceTensor | None = None,
    rotated_q: DeviceTensor | None = None,
    rotary: Rotary | None = None,
    advances: bool = True,
) -> AppendLaunch:
    """Writes `k`, rotated if there is a rotary, and `v` into a cache, and `q`, rotated, into `rotated_q`. The queries'
    positions grow from row to row if `advances`."""
    for tensor in (k_cache, v_cache, k, v, q, rotated_q):
        if tensor is not None:
            check_layout(tensor)
    if rotary is not None and (rotary.columns % ROTARY_STEP or not 0 < rotary.columns <= k_cache.shape[3]):
        raise ValueError(
            f"rotary: {rotary.columns} columns are not allowed; allowed: multiples of {ROTARY_STEP} up to head_dim = "
            f"{k_cache.shape[3]}"
        )
    if q is not None and decode.arguments.forward.q_starts:
        raise ValueError("rotary: ragged queries are not rotated here; every sequence has as many rows as the others")
    jobs = []
    if k is not None and v is not None:
        for name, source, target in (("k", k, k_cache), ("v", v, v_cache)):
            _check_like(name, source, target)
            jobs.append(_job(source, target, rotates=name == "k" and rotary is not None, into_cache=True))
    if rotated_q is not None and q is not None:
        jobs.append(_job(q, rotated_q, rotates=True, into_cache=False, advances=advances))
    if not jobs:
        raise ValueError("append: neither keys nor queries are given")
    sequences = decode.arguments.forward.batches
    most = max(job.heads * job.rows * job.columns for job in jobs) // 8
    arguments = DecodeArguments.from_buffer_copy(decode.arguments)
    arguments.appended_keys = 0
    append = AppendArguments(arguments, (AppendJob * 3)(*jobs))
    if rotary is not None:
        append.cosines, append.sines = rotary.cosines_address, rotary.sines_address
        append.rotary_columns, append.rotary_positions = rotary.columns, rotary.positions
        append.interleaved = rotary.interleaved
    blocks = max(1, min(-(-most // APPEND_THREADS), 1024))
    return AppendLaunch((blocks, len(jobs), sequences), append)


def append_source(config: Any, constants: dict[str, dict[str, Constant]]) -> KernelSource:
    return KernelSource(
        text=f'#include "{SPECIALISATION_HEADER}"\n#include "decode/append.cuh"\n',
        headers=((SPECIALISATION_HEADER, specialisation(config, constants)), *device_headers()),
        name_expression="decode_append_kernel<0>",
        file_name="decode_append.cu",
    )


def _job(
    source: DeviceTensor, target: DeviceTensor, *, rotates: bool, into_cache: bool, advances: bool = True
) -> AppendJob:
    return AppendJob(
        TensorView(source.address, *source.strides[:3]),
        TensorView(target.address, *target.strides[:3]),
        source.shape[1],
        source.shape[2],
        rotates,
        into_cache,
        advances,
        source.shape[3],
    )


def _check_like(name: str, source: DeviceTensor, target: DeviceTensor) -> None:
    if (source.shape[1], source.shape[3], source.dtype) != (target.shape[1], target.shape[3], target.dtype):
        raise ValueError(
            f"{name}: {source.shape} of {source.dtype.name} does not match its cache: {target.shape} of "
            f"{target.dtype.name}; heads, head_dim and dtype must agree"
        )
