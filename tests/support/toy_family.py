"""A third family of forward kernels, all of it in this file: one thread per query row, plain fp32 arithmetic.

It shows what a family consists of. Nothing in the package knows it before `registry.register(TOY_FORWARD)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from flashwright.kernels.explanation import Explanation, TracedWarp
from flashwright.kernels.family import FamilyLadder, KernelFamily, Occasion, SearchSpace
from flashwright.kernels.forward.launch import FORWARD
from flashwright.kernels.ladder import LadderRung, climbed
from flashwright.kernels.naming import check_field_types, parse_cpp_fields
from flashwright.kernels.source import SPECIALISATION_HEADER, KernelSource, specialisation, variant_constants
from flashwright.problem.dtypes import DType
from flashwright.problem.variant import AttentionVariant

WARP_ROWS = 32
MOST_ROWS, MOST_KEYS = 256, 8
D_HEADS = (32, 64)


# --- Config --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToyForwardKernelConfig:
    dtype: DType
    d_head: int
    B_r: int
    """Query rows, and threads, per thread block."""
    B_c: int
    """Keys per step."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DType.parse(self.dtype))
        check_field_types(self, ((field.name, field.type) for field in fields(self)))
        if self.d_head not in D_HEADS:
            raise ValueError(f"d_head: {self.d_head} is not allowed; allowed: {', '.join(map(str, D_HEADS))}")

    @property
    def n_warps(self) -> int:
        return self.B_r // WARP_ROWS

    def short_form(self) -> str:
        return f"toy ({self.dtype.name}, {self.d_head}, {self.B_r}, {self.B_c})"

    __str__ = short_form

    def kernel_name(self) -> str:
        values = f"{self.dtype.to_cpp()}, {self.d_head}, {self.B_r}, {self.B_c}"
        return f"toy_forward_kernel<{type(self).__name__}{{{values}}}>"


def parse_toy_config(text: str) -> ToyForwardKernelConfig:
    if match := re.search(r"ToyForwardKernelConfig\s*\{([^{}]*)\}", text):
        return parse_cpp_fields(ToyForwardKernelConfig, match[1], never_zero=4)
    if match := re.fullmatch(r"toy\s*\(\s*(\w+)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)", text.strip()):
        dtype, *sizes = match.groups()
        return ToyForwardKernelConfig(DType.parse(dtype), *map(int, sizes))
    raise ValueError(f"{text!r} names no toy kernel; expected a short form such as 'toy (BF16, 64, 64, 4)'")


# --- Shapes and source ---------------------------------------------------------------------------------------------


class ToyTileShapes:
    shared_bytes = 0

    def __init__(self, config: ToyForwardKernelConfig) -> None:
        if config.B_r % WARP_ROWS or not 0 < config.B_r <= MOST_ROWS:
            raise ValueError(f"B_r: {config.B_r} is not allowed; allowed: multiples of {WARP_ROWS} up to {MOST_ROWS}")
        if not 0 < config.B_c <= MOST_KEYS:
            raise ValueError(f"B_c: {config.B_c} is not allowed; allowed: 1 to {MOST_KEYS}")
        self.threads = config.B_r


def toy_source(config: ToyForwardKernelConfig, variant: AttentionVariant) -> KernelSource:
    shapes = ToyTileShapes(config)
    namespaces = {
        "cfg": {field.name: getattr(config, field.name) for field in fields(config)},
        "shape": {"threads": shapes.threads, "head_dim": variant.head_dim or config.d_head},
        "variant": variant_constants(variant),
    }
    return KernelSource(
        text=KERNEL,
        headers=((SPECIALISATION_HEADER, specialisation(config, namespaces)),),
        name_expression=config.kernel_name(),
        file_name="toy_forward.cu",
    )


KERNEL = r"""
#include "specialisation.cuh"

struct TensorView {
    char *data;
    long long batch_stride, head_stride, row_stride;
};
struct ForwardArguments {
    TensorView Q, K, V, O;
    float *lse;
    long long lse_batch_stride, lse_head_stride;
    const int *q_starts, *kv_starts;
    int q_length, kv_length, q_heads, q_heads_per_kv_head, q_blocks, batches;
    int window_left, window_right, align_bottom_right;
    float softmax_scale, capping_scale;
};
struct alignas(16) Vector {
    unsigned int words[4];
};
constexpr float log2_e = 1.4426950408889634f;
constexpr float negative_infinity = __builtin_bit_cast(float, 0xff800000);

__device__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ float widened(unsigned int bits) {
    if constexpr (cfg::dtype == DType::BF16)
        return __builtin_bit_cast(float, bits << 16);
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    return x;
}
__device__ unsigned int rounded(float low, float high) {
    unsigned int packed;
    if constexpr (cfg::dtype == DType::BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ char *row_of(const TensorView &tensor, int batch, int head, long long row) {
    return tensor.data + 2 * (batch * tensor.batch_stride + head * tensor.head_stride + row * tensor.row_stride);
}
__device__ void load(float (&x)[shape::head_dim], const char *row) {
#pragma unroll
    for (int i = 0; i < shape::head_dim / 8; ++i) {
        const Vector v = ((const Vector *)row)[i];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            x[8 * i + j] = widened(v.words[j / 2] >> 16 * (j % 2) & 0xffff);
    }
}

template <ToyForwardKernelConfig>
__global__ void __launch_bounds__(shape::threads) toy_forward_kernel(const __grid_constant__ ForwardArguments args) {
    const int head = blockIdx.x / args.q_blocks % args.q_heads, batch = blockIdx.x / args.q_blocks / args.q_heads;
    const int kv_head = head / args.q_heads_per_kv_head;
    const int row = blockIdx.x % args.q_blocks * cfg::B_r + threadIdx.x;
    long long q_start = 0, kv_start = 0;
    int q_length = args.q_length, kv_length = args.kv_length;
    if constexpr (variant::variable_lengths) {
        q_start = args.q_starts[batch];
        kv_start = args.kv_starts[batch];
        q_length = args.q_starts[batch + 1] - q_start;
        kv_length = args.kv_starts[batch + 1] - kv_start;
    }
    if (row >= q_length)
        return;
    const int shift = args.align_bottom_right ? kv_length - q_length : 0;
    const int first = variant::masks_left ? max(row + shift + args.window_left, 0) : 0;
    const int last = variant::masks_right ? min(row + shift + args.window_right, kv_length - 1) : kv_length - 1;

    float q[shape::head_dim], o[shape::head_dim] = {};
    load(q, row_of(args.Q, batch, head, q_start + row));
    float maximum = negative_infinity, sum = 0;
#pragma unroll 1
    for (int key = first; key <= last; key += cfg::B_c) {
        float s[cfg::B_c], x[shape::head_dim], largest = maximum;
#pragma unroll
        for (int j = 0; j < cfg::B_c; ++j) {
            load(x, row_of(args.K, batch, kv_head, kv_start + min(key + j, last)));
            s[j] = 0;
#pragma unroll
            for (int c = 0; c < shape::head_dim; ++c)
                s[j] += q[c] * x[c]; // @phase scores
            if constexpr (variant::softcaps)
                s[j] = 1 - 2 / (1 + exp2_approx(s[j] * args.capping_scale));
            s[j] = key + j <= last ? s[j] * (args.softmax_scale * log2_e) : negative_infinity;
            largest = fmaxf(largest, s[j]);
        }
        const float shrink = exp2_approx(maximum - largest);
        maximum = largest;
        sum *= shrink;
#pragma unroll
        for (int c = 0; c < shape::head_dim; ++c)
            o[c] *= shrink;
#pragma unroll
        for (int j = 0; j < cfg::B_c; ++j) {
            const float p = exp2_approx(s[j] - largest);
            sum += p;
            load(x, row_of(args.V, batch, kv_head, kv_start + min(key + j, last)));
#pragma unroll
            for (int c = 0; c < shape::head_dim; ++c)
                o[c] += p * x[c]; // @phase output
        }
    }

    const float factor = sum > 0 ? 1 / sum : 0;
    Vector *out = (Vector *)row_of(args.O, batch, head, q_start + row);
#pragma unroll
    for (int i = 0; i < shape::head_dim / 8; ++i) {
        Vector v;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            v.words[j] = rounded(o[8 * i + 2 * j] * factor, o[8 * i + 2 * j + 1] * factor);
        out[i] = v;
    }
    if constexpr (variant::returns_lse)
        args.lse[batch * args.lse_batch_stride + head * args.lse_head_stride + q_start + row] =
            sum > 0 ? (maximum + log2_approx(sum)) / log2_e : negative_infinity;
}
"""


# --- What is worth timing, the climb, and what there is to explain -------------------------------------------------


def toy_rejection_reason(config: ToyForwardKernelConfig) -> str | None:
    try:
        ToyTileShapes(config)
    except ValueError as error:
        return f"shapes: {error}"
    if config.B_r == WARP_ROWS:
        return f"warps: B_r = {config.B_r} is one warp a thread block; an SM holds at most 32 blocks"
    return None


def toy_space(dtype: DType, d_head: int) -> Iterator[tuple[ToyForwardKernelConfig, str | None]]:
    for B_r, B_c in product((32, 64, 128), (1, 4)):
        config = ToyForwardKernelConfig(dtype, d_head, B_r, B_c)
        yield config, toy_rejection_reason(config)


def toy_progression(dtype: DType | str = DType.BF16, d_head: int = 64) -> list[LadderRung[ToyForwardKernelConfig]]:
    base = ToyForwardKernelConfig(DType.parse(dtype), d_head, 64, 1)
    changes: list[tuple[str, dict[str, Any]]] = [("base: key by key", {}), ("four keys a step", {"B_c": 4})]
    return climbed(base, changes)


def toy_default(occasion: Occasion) -> ToyForwardKernelConfig:
    return ToyForwardKernelConfig(occasion.dtype, occasion.d_head, 64, 4)


TOY_FORWARD = KernelFamily(
    operation=FORWARD,
    name="toy",
    title="Toy",
    config_type=ToyForwardKernelConfig,
    d_heads=D_HEADS,
    parse=parse_toy_config,
    shapes=ToyTileShapes,
    source=toy_source,
    rejection_reason=toy_rejection_reason,
    default_config=toy_default,
    suits=lambda occasion: False,
    space=SearchSpace(toy_space, is_promising=lambda config: config.B_c > 1, rules=("shapes", "warps")),
    ladder=FamilyLadder(toy_progression, architectures=("sm_80",), peers=("sdpa-fa2",)),
    explanation=Explanation(warps=lambda config: (TracedWarp(0, loop_kinds=("GLOBAL", "FLOAT", "EXPONENTIAL")),)),
)
