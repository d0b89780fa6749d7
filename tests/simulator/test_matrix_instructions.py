"""ldmatrix, stmatrix, movmatrix and mma.sync against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashwright.simulator.errors import SimulationError

from .tools import compile_cuda, launch

LANE = np.arange(32)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_gives_each_lane_its_pair(count: int, transposed: bool) -> None:
    registers = ", ".join(f"%{i}" for i in range(count))
    suffix = ".trans" if transposed else ""
    outputs = ", ".join(f'"=r"(r[{i}])' for i in range(count))
    ptx = compile_cuda(f"""extern "C" __global__ void k(unsigned *out, const unsigned *in) {{
        __shared__ __align__(16) unsigned tile[32 * 4];
        for (int i = 0; i < 4; ++i) tile[threadIdx.x * 4 + i] = in[threadIdx.x * 4 + i];
        __syncwarp();
        unsigned r[4] = {{}}, address = (unsigned)__cvta_generic_to_shared(&tile[threadIdx.x * 4]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{suffix}.shared.b16 {{{registers}}}, [%{count}];"
            : {outputs} : "r"(address));
        for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = r[i];
    }}""")
    matrices = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    result = {"out": np.zeros((32, 4), np.uint32)}
    run = launch(ptx, 32, result, matrices.view(np.uint32).ravel())
    expected = matrices.swapaxes(1, 2) if transposed else matrices
    for i in range(count):
        pairs = np.ascontiguousarray(expected[i]).view(np.uint32).ravel()
        assert (result["out"][:, i] == pairs).all()
    counted = next(c for c in run.per_instruction if c.opcode.startswith("ldmatrix")).counts
    assert counted.shared_wavefronts == counted.shared_wavefronts_ideal == count
    assert counted.bytes_shared_to_registers == count * 128


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_is_the_inverse_of_ldmatrix(transposed: bool) -> None:
    suffix = ".trans" if transposed else ""
    ptx = compile_cuda(
        f"""extern "C" __global__ void k(unsigned *out, const unsigned *in) {{
        __shared__ __align__(16) unsigned tile[32 * 4];
        unsigned address = (unsigned)__cvta_generic_to_shared(&tile[threadIdx.x * 4]);
        asm volatile("stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%0], {{%1, %2, %3, %4}};"
            :: "r"(address), "r"(in[threadIdx.x]), "r"(in[32 + threadIdx.x]), "r"(in[64 + threadIdx.x]),
               "r"(in[96 + threadIdx.x]));
        __syncwarp();
        for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = tile[threadIdx.x * 4 + i];
    }}""",
        "sm_90",
    )
    matrices = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    result = {"out": np.zeros(128, np.uint32)}
    launch(ptx, 32, result, matrices.view(np.uint32).ravel(), arch="sm_90")
    stored = result["out"].view(np.uint16).reshape(4, 8, 8)
    assert (stored == (matrices.swapaxes(1, 2) if transposed else matrices)).all()


def test_movmatrix_transposes() -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(unsigned *out, const unsigned *in) {
        unsigned r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(in[threadIdx.x]));
        out[threadIdx.x] = r; }""")
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    result = {"out": np.zeros(32, np.uint32)}
    launch(ptx, 32, result, matrix.view(np.uint32).ravel())
    assert (result["out"].view(np.uint16).reshape(8, 8) == matrix.T).all()


# Fragments written out from the PTX ISA's figures, element by element.
def a_fragment(matrix: np.ndarray, elements: int) -> np.ndarray:
    """[lane, register, element] of a 16×k matrix."""
    g, t = LANE // 4, LANE % 4
    depth = matrix.shape[1]
    registers = []
    for r in range(2 * depth // (4 * elements)):
        columns = 4 * elements * (r // 2) + elements * t[:, None] + np.arange(elements)
        registers.append(matrix[(g + 8 * (r % 2))[:, None], columns])
    return np.stack(registers, axis=1)


def b_fragment(matrix: np.ndarray, elements: int) -> np.ndarray:
    """[lane, register, element] of a k×8 matrix."""
    g, t = LANE // 4, LANE % 4
    registers = [
        matrix[4 * elements * r + elements * t[:, None] + np.arange(elements), g[:, None]]
        for r in range(matrix.shape[0] // (4 * elements))
    ]
    return np.stack(registers, axis=1)


def c_fragment(matrix: np.ndarray) -> np.ndarray:
    g, t = LANE // 4, LANE % 4
    return np.stack([matrix[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)], axis=1)


DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "s8": np.int8, "u8": np.uint8, "tf32": np.float32}


@pytest.mark.parametrize(
    ("inputs", "accumulator", "depth"),
    [
        ("f16", "f32", 16), ("bf16", "f32", 16), ("f16", "f32", 8), ("bf16", "f32", 8), ("f16", "f16", 16),
        ("f16", "f16", 8), ("tf32", "f32", 8), ("tf32", "f32", 4), ("s8", "s32", 32), ("u8", "s32", 16),
    ],
)  # fmt: skip
def test_mma_multiplies_and_accumulates(inputs: str, accumulator: str, depth: int) -> None:
    dtype = DTYPES[inputs]
    rng = np.random.default_rng(depth)
    a, b, c = (rng.integers(-8, 8, shape).astype(np.float64) for shape in ((16, depth), (depth, 8), (16, 8)))
    if inputs == "u8":
        a, b = np.abs(a), np.abs(b)
    elements = 4 // np.dtype(dtype).itemsize
    a_raw = np.ascontiguousarray(a_fragment(a.astype(dtype), elements)).view(np.uint32).reshape(32, -1)
    b_raw = np.ascontiguousarray(b_fragment(b.astype(dtype), elements)).view(np.uint32).reshape(32, -1)
    c_dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[accumulator]
    c_raw = np.ascontiguousarray(c_fragment(c).astype(c_dtype)).view(np.uint32).reshape(32, -1)
    n_a, n_b, n_c = a_raw.shape[1], b_raw.shape[1], c_raw.shape[1]
    kind = f"m16n8k{depth}.row.col.{accumulator}.{inputs}.{inputs}.{accumulator}"
    places = [f"%{i}" for i in range(2 * n_c + n_a + n_b)]
    groups = [
        places[:n_c], places[n_c : n_c + n_a], places[n_c + n_a : n_c + n_a + n_b], places[n_c + n_a + n_b :],
    ]  # fmt: skip
    operands = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    results = ", ".join(f'"=r"(d[{i}])' for i in range(n_c))
    sources = ", ".join(
        [f'"r"(a[t * {n_a} + {i}])' for i in range(n_a)]
        + [f'"r"(b[t * {n_b} + {i}])' for i in range(n_b)]
        + [f'"r"(c[t * {n_c} + {i}])' for i in range(n_c)]
    )
    ptx = compile_cuda(f"""typedef const unsigned *In;
    extern "C" __global__ void k(unsigned *out, In a, In b, In c) {{
        int t = threadIdx.x % 32; unsigned d[{n_c}];
        asm volatile("mma.sync.aligned.{kind} {operands};" : {results} : {sources});
        for (int i = 0; i < {n_c}; ++i) out[threadIdx.x * {n_c} + i] = d[i];
    }}""")
    result = {"out": np.zeros((64, n_c), np.uint32)}
    run = launch(ptx, 64, result, a_raw.ravel(), b_raw.ravel(), c_raw.ravel())
    expected = c_fragment(a @ b + c).astype(c_dtype)
    for warp in range(2):
        found = np.ascontiguousarray(result["out"][32 * warp : 32 * warp + 32]).view(c_dtype).reshape(32, 4)
        assert (found == expected).all()
    assert run.counters.tensor_flops == 2 * 2 * 16 * 8 * depth


def test_mma_sums_exactly_and_rounds_once() -> None:
    # 2^24 + 1 + 1 needs an exact sum: in single precision one after the other, both ones would be lost.
    a, b = np.zeros((16, 16)), np.ones((16, 8))
    a[:, 0], a[:, 1], a[:, 2] = 1.0, 1.0, 0.0
    c = np.full((16, 8), 2.0**24)
    ptx = compile_cuda("""typedef const unsigned *In;
    extern "C" __global__ void k(float *out, In a, In b, const float *c) {
        int t = threadIdx.x; float d[4];
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[4 * t]), "r"(a[4 * t + 1]), "r"(a[4 * t + 2]), "r"(a[4 * t + 3]), "r"(b[2 * t]), "r"(b[2 * t + 1]),
              "f"(c[0]), "f"(c[0]), "f"(c[0]), "f"(c[0]));
        for (int i = 0; i < 4; ++i) out[4 * t + i] = d[i]; }""")
    bf16 = ml_dtypes.bfloat16
    result = {"out": np.zeros(128, np.float32)}
    fragments = [
        np.ascontiguousarray(f).view(np.uint32).ravel()
        for f in (a_fragment(a.astype(bf16), 2), b_fragment(b.astype(bf16), 2))
    ]
    launch(ptx, 32, result, *fragments, c.astype(np.float32).ravel())
    assert (result["out"] == 2.0**24 + 2).all()


def test_aligned_instruction_in_a_divergent_branch_is_refused() -> None:
    ptx = compile_cuda("""extern "C" __global__ void k(unsigned *out) {
        __shared__ __align__(16) unsigned tile[128];
        for (int i = 0; i < 4; ++i) tile[threadIdx.x * 4 + i] = i;
        __syncwarp();
        if (threadIdx.x < 16) {
            unsigned r, address = (unsigned)__cvta_generic_to_shared(&tile[threadIdx.x * 4]);
            asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r) : "r"(address));
            out[threadIdx.x] = r;
        }
        else out[threadIdx.x] = 5;
    }""")
    with pytest.raises(SimulationError) as caught:
        launch(ptx, 32, {"out": np.zeros(32, np.uint32)})
    assert caught.value.kind == "barrier"
    assert "part of the warp" in caught.value.detail


def test_mma_reads_all_accumulators_before_it_writes_any() -> None:
    """C's registers in another order than D's, as the assembler allows."""
    ptx = compile_cuda("""extern "C" __global__ void k(float *out) {
        float d0 = 1, d1 = 2, d2 = 3, d3 = 4;
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, {%3, %2, %1, %0};"
                     : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "r"(0));
        float *mine = out + threadIdx.x * 4;
        mine[0] = d0; mine[1] = d1; mine[2] = d2; mine[3] = d3;
    }""")
    result = {"out": np.zeros((32, 4), np.float32)}
    launch(ptx, 32, result)
    assert (result["out"] == [4, 3, 2, 1]).all()
