"""Launches whose counters are known from Nsight Compute on a real GPU, to hold the simulator against.

Forward kernels of four configs, and one-warp kernels written to conflict in a known way. Every small kernel reads
`in` and writes `out`, 16,384 floats each, and is one warp or a few.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashwright.kernels.source import KernelSource

DATA = Path(__file__).parent / "data"
ELEMENTS = 16_384

FORWARD_CONFIGS = {
    "forward_base": "(BF16, 128, 64, 64, 4): async+load_0_0_0_tiles",
    "forward_synchronous": "(FP16, 64, 64, 32, 4): swizzled+load_2_2_2_tiles",
    "forward_swizzled": "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
    "forward_last_rung": (
        "(BF16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax+peeled+reversed"
        "+streaming+mma_sum"
    ),
    "forward_eight_warps": "(BF16, 64, 128, 128, 8): async+eager+load_4_4_4_tiles+opt_softmax",
}
FORWARD_ROWS = 256
FORWARD_HEADS = 2

_SHARED_PROLOGUE = """
    __shared__ __align__(128) float tile[4096];
    unsigned base = (unsigned)__cvta_generic_to_shared(tile);
    int lane = threadIdx.x;
    for (int i = lane; i < 4096; i += 32) tile[i] = in[i];
    __syncwarp();
"""


def _load_shared(width: int, byte_offset: str) -> str:
    """A warp's load of `width` 32-bit words from shared memory."""
    registers = ", ".join(f"%{i}" for i in range(width))
    outputs = ", ".join(f'"=f"(v[{i}])' for i in range(width))
    vector = {1: "f32", 2: "v2.f32", 4: "v4.f32"}[width]
    target = f"{{{registers}}}" if width > 1 else registers
    return (
        _SHARED_PROLOGUE
        + f"""
    float v[{width}];
    asm volatile("ld.shared.{vector} {target}, [%{width}];" : {outputs} : "r"(base + {byte_offset}));
    float sum = 0;
    for (int i = 0; i < {width}; ++i) sum += v[i];
    out[lane] = sum;
"""
    )


def _store_shared(byte_offset: str) -> str:
    return (
        _SHARED_PROLOGUE
        + f"""
    asm volatile("st.shared.f32 [%0], %1;" :: "r"(base + {byte_offset}), "f"(in[lane]) : "memory");
    __syncwarp();
    out[lane] = tile[lane];
"""
    )


def _ldmatrix(byte_offset: str) -> str:
    return (
        _SHARED_PROLOGUE
        + f"""
    unsigned v[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(base + {byte_offset}) : "memory");
    out[lane] = __int_as_float(v[0] ^ v[1] ^ v[2] ^ v[3]);
"""
    )


def _cp_async(shared_offset: str, global_index: str) -> str:
    return f"""
    __shared__ __align__(128) float tile[4096];
    unsigned base = (unsigned)__cvta_generic_to_shared(tile);
    int lane = threadIdx.x;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(base + {shared_offset}), "l"(in + {global_index}) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(base + {shared_offset}) : "memory");
    out[lane] = v;
"""


def _global(load_index: str, store_index: str) -> str:
    return f"""
    int lane = threadIdx.x;
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(in + {load_index}));
    out[{store_index}] = v;
"""


_SMALL_KERNEL_BODIES = {
    "shared_load_conflict_free": _load_shared(1, "lane * 4"),
    "shared_load_broadcast": _load_shared(1, "0"),
    "shared_load_conflict_2": _load_shared(1, "lane * 8"),
    "shared_load_conflict_4": _load_shared(1, "lane * 16"),
    "shared_load_conflict_8": _load_shared(1, "lane * 32"),
    "shared_load_conflict_32": _load_shared(1, "lane * 128"),
    "shared_store_conflict_8": _store_shared("lane * 32"),
    "shared_load_64bit": _load_shared(2, "lane * 8"),
    "shared_load_64bit_conflict": _load_shared(2, "lane * 16"),
    "shared_load_128bit": _load_shared(4, "lane * 16"),
    "shared_load_128bit_conflict": _load_shared(4, "lane * 128"),
    "ldmatrix_conflict_free": _ldmatrix("lane * 16"),
    "ldmatrix_conflict_2": _ldmatrix("lane * 32"),
    "ldmatrix_conflict_8": _ldmatrix("lane * 128"),
    "cp_async_conflict_free": _cp_async("lane * 16", "lane * 4"),
    "cp_async_conflict_8": _cp_async("lane * 128", "lane * 4"),
    "cp_async_uncoalesced": _cp_async("lane * 16", "lane * 64"),
    "global_coalesced": _global("lane", "lane"),
    "global_shifted": _global("lane + 1", "lane"),
    "global_stride_2": _global("lane * 2", "lane"),
    "global_stride_32": _global("lane * 32", "lane"),
    "global_store_stride_8": _global("lane", "lane * 8"),
}

SMALL_KERNELS = {
    name: KernelSource(
        text=f'extern "C" __global__ void {name}(const float *in, float *out) {{{body}}}\n',
        headers=(),
        name_expression=name,
        file_name=f"{name}.cu",
    )
    for name, body in _SMALL_KERNEL_BODIES.items()
}


@dataclass(frozen=True)
class ArithmeticCase:
    """A kernel of one thread block whose results are compared, not its counters: out[i] from in[…]."""

    name: str
    body: str
    inputs: str
    """`mma`: 16-bit operands at many magnitudes; `floats`: a grid of arguments for one function."""

    @property
    def source(self) -> KernelSource:
        return KernelSource(
            text=f'extern "C" __global__ void {self.name}(const unsigned *in, float *out) {{{self.body}}}\n',
            headers=(),
            name_expression=self.name,
            file_name=f"{self.name}.cu",
        )


MMA_REPEATS = 64


def _mma(types: str) -> str:
    # Per repeat, a lane reads 4 words of A, 2 of B and 4 of C.
    return f"""
    int lane = threadIdx.x;
    for (int r = 0; r < {MMA_REPEATS}; ++r) {{
        const unsigned *p = in + (r * 32 + lane) * 10;
        float c[4];
        for (int i = 0; i < 4; ++i) c[i] = __int_as_float(p[6 + i]);
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.{types}.{types}.f32 "
                     "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(p[4]), "r"(p[5]));
        for (int i = 0; i < 4; ++i) out[(r * 32 + lane) * 4 + i] = c[i];
    }}
"""


def _function(instruction: str) -> str:
    return f"""
    for (int i = threadIdx.x; i < 4096; i += 32) {{
        float y;
        asm volatile("{instruction} %0, %1;" : "=f"(y) : "f"(__int_as_float(in[i])));
        out[i] = y;
    }}
"""


ARITHMETIC_CASES = (
    ArithmeticCase("mma_f16", _mma("f16"), "mma"),
    ArithmeticCase("mma_bf16", _mma("bf16"), "mma"),
    *(
        ArithmeticCase(instruction.replace(".", "_"), _function(instruction), "floats")
        for instruction in (
            "ex2.approx.ftz.f32",
            "lg2.approx.ftz.f32",
            "rcp.approx.ftz.f32",
            "rsqrt.approx.ftz.f32",
            "sqrt.approx.ftz.f32",
            "sin.approx.ftz.f32",
            "cos.approx.ftz.f32",
            "tanh.approx.f32",
        )
    ),
)
