"""Attention kernels that other people's compilers made, and other people wrote: right results, and no false alarm.

`data/README.md` says where they come from.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashwright.hardware.tensor_map import Swizzle, TensorMap
from flashwright.simulator import SimulatedGPU, SimulationError

DATA = Path(__file__).parent / "data"
BF16 = np.dtype(ml_dtypes.bfloat16)


@cache
def ptx(name: str) -> str:
    return gzip.decompress((DATA / f"{name}.ptx.gz").read_bytes()).decode()


def tensors(*shape: int, count: int = 3) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(BF16) for _ in range(count)]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, causal: bool) -> tuple[np.ndarray, ...]:
    """(O, log-sum-exp, P) of [heads, length, d], in double precision."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.swapaxes(1, 2) * scale
    if causal:
        rows, columns = scores.shape[1:]
        scores = np.where(np.arange(columns) <= np.arange(rows)[:, None] + columns - rows, scores, -np.inf)
    largest = scores.max(axis=2, keepdims=True)
    lse = np.log(np.exp(scores - largest).sum(axis=2)) + largest[..., 0]
    p = np.exp(scores - lse[..., None])
    return p @ v, lse, p


# A kernel of the seed system's shape ------------------------------------------------------------------------------


def run_seed_shape(text: str, check_hazards: bool = True) -> Any:
    q, k, v = tensors(2, 128, 128)
    scale = 128**-0.5
    gpu = SimulatedGPU("sm_80")
    out = gpu.to_device(np.zeros_like(q))
    arguments = [*map(gpu.to_device, (q, k, v)), out, np.int32(128), np.float32(scale)]
    run = gpu.load(text).launch("seed_forward", (2, 2), 128, 3 * 64 * 128 * 2, arguments, check_hazards=check_hazards)
    np.testing.assert_allclose(gpu.to_host(out).astype(np.float64), attention(q, k, v, scale, False)[0], atol=5e-3)
    return run


@pytest.mark.parametrize("check_hazards", [True, False])
def test_the_seed_systems_shape_from_nvcc(check_hazards: bool) -> None:
    run = run_seed_shape(ptx("nvcc_seed_shape"), check_hazards)
    assert run.counters.bank_conflicts == 0
    assert run.counters.tensor_flops == 2 * 2 * 2 * 128 * 128 * 128


def without(text: str, line: str, number: int) -> str:
    """The text without the ``number``-th occurrence of a line."""
    parts = text.split(line)
    return line.join(parts[: number + 1]) + line.join(["", *parts[number + 1 :]])[len(line) :]


@pytest.mark.parametrize("number", range(5))
def test_each_barrier_of_the_seed_systems_shape_is_missed(number: int) -> None:
    text = ptx("nvcc_seed_shape")
    assert text.count("bar.sync \t0;") == 5
    with pytest.raises(SimulationError) as caught:
        run_seed_shape(without(text, "bar.sync \t0;", number))
    assert caught.value.kind in ("race", "async-copy")


# FlashAttention-2 -------------------------------------------------------------------------------------------------


def run_flash_attention_2(kernels: Sequence[tuple[str, int, tuple[int, ...], int]], **arrays: np.ndarray) -> Any:
    """Launch kernels (name, threads, grid, dynamic shared bytes) on the arguments of `flash_attention_2.cu`."""
    gpu = SimulatedGPU("sm_80")
    module = gpu.load(ptx("nvcc_flash_attention_2"))
    names = ("q", "k", "v", "o", "dout", "dq", "dk", "dv", "lse", "dsum", "dq_accum")
    pointers = {name: gpu.to_device(arrays[name]) if name in arrays else 0 for name in names}
    (batch, q_length, heads, _), (_, k_length, kv_heads, _) = arrays["q"].shape, arrays["k"].shape
    sizes = batch, heads, kv_heads, q_length, k_length
    packed = struct.pack("<11Q5if", *pointers.values(), *sizes, 0.125)
    for name, threads, grid, shared_bytes in kernels:
        module.launch(name, grid, threads, shared_bytes, [packed])
    return {name: gpu.to_host(pointers[name]) for name in arrays}


def by_head(array: np.ndarray, groups: int = 1) -> np.ndarray:
    """[1, length, heads, d] → [heads, length, d], each head ``groups`` times."""
    return np.repeat(array[0].swapaxes(0, 1), groups, axis=0)


def test_flash_attention_2_forward() -> None:
    (q,), (k, v) = tensors(1, 64, 4, 64, count=1), tensors(1, 128, 2, 64, count=2)
    found = run_flash_attention_2(
        [("fa2_forward", 128, (1, 1, 4), 3 * 64 * 64 * 2)],
        q=q, k=k, v=v, o=np.zeros_like(q), lse=np.zeros((1, 4, 64), np.float32),
    )  # fmt: skip
    out, lse, _ = attention(by_head(q), by_head(k, 2), by_head(v, 2), 0.125, True)
    np.testing.assert_allclose(by_head(found["o"]).astype(np.float64), out, atol=1e-2)
    np.testing.assert_allclose(found["lse"][0], lse, atol=1e-5)


def test_flash_attention_2_backward() -> None:
    q, k, v, dout = tensors(1, 128, 2, 64, count=4)
    out, lse, p = attention(by_head(q), by_head(k), by_head(v), 0.125, True)
    found = run_flash_attention_2(
        [
            ("fa2_dot", 256, (2, 1, 2), 0),
            ("fa2_backward", 256, (1, 1, 2), 144 * 1024),
            ("fa2_convert", 256, (2, 1, 2), 64 * 64 * 2),
        ],
        q=q, k=k, v=v, dout=dout, o=out.swapaxes(0, 1)[None].astype(BF16), lse=lse[None].astype(np.float32),
        dq=np.zeros_like(q), dk=np.zeros_like(k), dv=np.zeros_like(v), dsum=np.zeros((1, 2, 128), np.float32),
        dq_accum=np.zeros(q.shape, np.float32),
    )  # fmt: skip
    g, queries, keys, values = (by_head(x).astype(np.float64) for x in (dout, q, k, v))
    ds = p * (g @ values.swapaxes(1, 2) - (g * out).sum(axis=2, keepdims=True)) * 0.125
    expected = {"dq": ds @ keys, "dk": ds.swapaxes(1, 2) @ queries, "dv": p.swapaxes(1, 2) @ g}
    for name, gradient in expected.items():
        np.testing.assert_allclose(by_head(found[name]).astype(np.float64), gradient, atol=3e-2, err_msg=name)


def test_rows_that_flash_attention_2_never_clears_are_a_finding_and_no_stop() -> None:
    """It multiplies rows beyond the end of Q that nobody wrote, and throws the results away."""
    (q,), (k, v) = tensors(1, 50, 2, 64, count=1), tensors(1, 64, 2, 64, count=2)
    gpu = SimulatedGPU("sm_80")
    module = gpu.load(ptx("nvcc_flash_attention_2"))
    out, lse = gpu.to_device(np.zeros_like(q)), gpu.to_device(np.zeros((1, 2, 50), np.float32))
    pointers = [*map(gpu.to_device, (q, k, v)), out, 0, 0, 0, 0, lse, 0, 0]
    packed = struct.pack("<11Q5if", *pointers, 1, 2, 2, 50, 64, 0.125)
    run = module.launch(
        "fa2_forward", (1, 1, 2), 128, 3 * 64 * 64 * 2, [packed], check_hazards={"uninitialised-shared": "collect"}
    )
    assert {finding.kind for finding in run.findings} == {"uninitialised-shared"}
    expected = attention(by_head(q), by_head(k), by_head(v), 0.125, True)[0]
    np.testing.assert_allclose(by_head(gpu.to_host(out)).astype(np.float64), expected, atol=1e-2)


# Triton -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arch", "shared_bytes"),
    [
        ("triton_attention_sm80", "sm_80", 40960),  # mma.sync
        ("triton_attention_sm90", "sm_90a", 57344),  # wgmma behind cp.async
        ("triton_attention_tma_sm90", "sm_90a", 57400),  # wgmma behind bulk tensor copies
    ],
)
def test_triton_attention(name: str, arch: str, shared_bytes: int) -> None:
    heads, length = 2, 192
    q, k, v = tensors(heads, length, 64)
    gpu = SimulatedGPU(arch)
    addresses = [gpu.to_device(array) for array in (q, k, v, np.zeros_like(q))]
    lse = gpu.to_device(np.zeros((heads, length), np.float32))
    has_descriptors = "tma" in name
    arguments: list[Any] = [*addresses, lse]
    if has_descriptors:  # each is a tensor map, its shape and its strides
        maps = [TensorMap(a, BF16, (64, heads * length), (128,), (64, 64), swizzle=Swizzle.B128) for a in addresses]
        sizes = [np.int32(heads * length), np.int32(64), np.int64(64), np.int64(1)]
        arguments = [item for tensor_map in maps for item in (tensor_map, *sizes)]
    arguments += [np.int32(length), np.float32(0.125), 0, 0]  # Triton adds two scratch pointers
    module = gpu.load(ptx(name))
    run = module.launch(module.kernels[0], (length // 64, heads), 128, shared_bytes, arguments)
    assert all(finding.kind == "mbarrier-fence" for finding in run.findings)
    out, expected_lse, _ = attention(q, k, v, 0.125, True)
    np.testing.assert_allclose(gpu.to_host(addresses[3]).astype(np.float64), out, atol=2e-2)
    if not has_descriptors:
        np.testing.assert_allclose(gpu.to_host(lse), expected_lse, atol=1e-5)
