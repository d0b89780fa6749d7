"""Warp-specialised kernels: a producer and consumer warpgroups that wait for each other through mbarriers."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.hardware.tensor_map import Swizzle, TensorMap
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

from .hopper_tools import BF16, run_cuda

# C = A·Bᵀ by blocks of 128×64: a producer warp copies steps of 64 columns into a ring of stages; each of two consumer
# warpgroups multiplies 64 rows with wgmma and puts its part of C into shared memory, from where it is bulk-stored.
GEMM = r"""
constexpr int stages = 2, a_bytes = 128 * 128, b_bytes = 64 * 128, stage_bytes = a_bytes + b_bytes;
extern "C" __global__ void __launch_bounds__(384, 1) k(const __grid_constant__ Map A, const __grid_constant__ Map B,
                                                       const __grid_constant__ Map C, int steps) {
  extern __shared__ __align__(1024) char s[];
  __shared__ u64 bars[2 * stages];
  const u32 full = addr(bars), empty = full + 8 * stages, tiles = addr(s), out = tiles + stages * stage_bytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) { init(full + 8 * i, 1); init(empty + 8 * i, 8); }
    init_fence();
  }
  __syncthreads();
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == 8 && elect()) {
      for (int step = 0; step < steps; ++step) {
        const int stage = step % stages, lap = step / stages % 2;
        wait(empty + 8 * stage, lap ^ 1);
        expect(full + 8 * stage, stage_bytes);
        load2(tiles + stage * stage_bytes, A, full + 8 * stage, 64 * step, row);
        load2(tiles + stage * stage_bytes + a_bytes, B, full + 8 * stage, 64 * step, 0);
      }
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int group = warp / 4;
  float d[8][4];
  for (int step = 0; step < steps; ++step) {
    const int stage = step % stages, lap = step / stages % 2;
    wait(full + 8 * stage, lap);
    const u32 a = tiles + stage * stage_bytes + group * 64 * 128, b = tiles + stage * stage_bytes + a_bytes;
    fence();
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int k = 0; k < 4; ++k) mma(d[n], desc(a + 32 * k), desc(b + n * 8 * 128 + 32 * k), step || k);
    commit();
    finish<0>();
    if (lane == 0) arrive(empty + 8 * stage);
  }
  // Rows of 64 floats, in two panels of 32 columns: 128 swizzled bytes.
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = warp * 16 + lane / 4 + 8 * half, column = 8 * n + lane % 4 * 2;
      u32 place = out + column / 32 * (128 * 128) + r * 128 + column % 32 * 4;
      place ^= (place >> 7 & 7) << 4;
      const float left = d[n][2 * half], right = d[n][2 * half + 1];
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(place), "f"(left), "f"(right) : "memory");
    }
  proxy_fence();
  bar(1 + group, 128);
  if (warp % 4 == 0 && elect()) {
    for (int panel = 0; panel < 2; ++panel)
      store2(out + panel * (128 * 128) + group * 64 * 128, C, 32 * panel, row + group * 64);
    bulk_commit();
    bulk_wait_read();
  }
}
"""


def run_gemm(
    source: str = GEMM, depth: int = 320, rows: int = 200, **options: object
) -> tuple[np.ndarray, np.ndarray, Run]:
    """The kernel's result, the exact one, and the run."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (count, depth)).astype(BF16) for count in (rows, 64))
    gpu = SimulatedGPU("sm_90a")
    c_address = gpu.to_device(np.full((rows, 64), np.nan, np.float32))

    def operand(array: np.ndarray, box_rows: int) -> TensorMap:
        return TensorMap(
            gpu.to_device(array), BF16, (depth, len(array)), (2 * depth,), (64, box_rows), swizzle=Swizzle.B128
        )

    c = TensorMap(c_address, np.dtype(np.float32), (64, rows), (256,), (32, 64), swizzle=Swizzle.B128)
    args = [operand(a, 128), operand(b, 64), c, np.int32(-(-depth // 64))]
    run = run_cuda(
        source, 384, args, gpu, grid=-(-rows // 128), shared_bytes=2 * (128 + 64) * 128 + 2 * 128 * 128, **options
    )
    return gpu.to_host(c_address), a.astype(np.float64) @ b.astype(np.float64).T, run


@pytest.mark.parametrize("check_hazards", [True, False])
def test_a_pipelined_product_is_right_with_and_without_hazard_checks(check_hazards: bool) -> None:
    result, expected, run = run_gemm(check_hazards=check_hazards)
    np.testing.assert_array_equal(result, expected)
    steps = 5
    assert run.counters.tensor_flops == 2 * 2 * 128 * 64 * 64 * steps
    assert run.counters.mbarrier_phases == 2 * steps * 2  # full and empty, in two blocks
    # A beyond its last row is filled without being read; B is read by both blocks.
    assert run.counters.bytes_global_to_shared == (200 + 2 * 64) * 320 * 2
    assert run.counters.bytes_shared_to_global == 200 * 64 * 4


def test_counters_do_not_depend_on_waiting() -> None:
    first, second = (run_gemm()[2].to_dict() for _ in range(2))
    assert first == second
    # Threads that wait spin in hardware; here a wait counts once, however long it takes.
    waits = sum(count for opcode, count in first["counters"]["instructions"].items() if "try_wait" in opcode)
    assert waits == 2 * (5 + 8 * 5)


def test_registers_move_from_the_producer_to_the_consumers() -> None:
    run_gemm(registers=168)
    with pytest.raises(SimulationError, match="launched with 128 and has") as caught:
        run_gemm(registers=128)
    assert caught.value.kind == "deadlock"
    with pytest.raises(SimulationError, match="the warp has 240") as caught:
        run_gemm(registers=240)
    assert caught.value.kind == "registers"
    with pytest.raises(SimulationError, match="multiples of 8"):
        run_gemm(GEMM.replace("u32 40;", "u32 41;"))


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (("expect(full + 8 * stage, stage_bytes)", "expect(full + 8 * stage, stage_bytes + 512)"),
         ["tx-count of 512 bytes expected but not copied", "1 of 1 arrivals", "parity 0"]),
        (("if (lane == 0) arrive(empty", "if (lane == 0 && warp) arrive(empty"),
         ["7 of 8 arrivals", "thread block (0, 0, 0): warps 8)", "one other thread block"]),
        (("lap ^ 1);\n        expect", "lap);\n        expect"), ["0 of 8 arrivals", "0 of 1 arrivals"]),
        (("bar(1 + group, 128)", "bar(1 + group, 160)"), ["barrier 1 has 128 of 160 threads"]),
    ],
)  # fmt: skip
def test_a_deadlock_says_who_waits_for_what(change: tuple[str, str], messages: list[str]) -> None:
    assert change[0] in GEMM
    with pytest.raises(SimulationError) as caught:
        run_gemm(GEMM.replace(*change))
    assert caught.value.kind == "deadlock"
    for message in messages:
        assert message in str(caught.value), str(caught.value)


def test_a_kernel_that_gives_up_waiting_goes_on() -> None:
    source = r"""
extern "C" __global__ void k(int *out) {
  __shared__ u64 bar_;
  const u32 b = addr(&bar_);
  if (threadIdx.x == 0) init(b, 1);
  __syncthreads();
  int done = 0, tries = 0;
  while (!done && tries < 5) {
    asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0, 1000;\n selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(b) : "memory");
    ++tries;
  }
  out[threadIdx.x] = 10 * done + tries;
}"""
    gpu = SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros(32, np.int32))
    run_cuda(source, 32, [out], gpu)
    assert (gpu.to_host(out) == 5).all()


def test_phases_alternate_and_the_one_before_the_first_counts_as_complete() -> None:
    source = r"""
D int test(u32 b, u32 parity) {
  int done;
  asm volatile("{.reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(b), "r"(parity) : "memory");
  return done;
}
extern "C" __global__ void k(int *out) {
  __shared__ u64 bar_;
  const u32 b = addr(&bar_);
  u64 state; int done;
  if (threadIdx.x) return;
  init(b, 2);
  out[0] = test(b, 1); out[1] = test(b, 0);
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(b) : "memory");
  out[2] = test(b, 0);
  arrive(b);
  out[3] = test(b, 0); out[4] = test(b, 1);
  asm volatile("{.reg .pred p;\n mbarrier.test_wait.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;}"
               : "=r"(done) : "r"(b), "l"(state) : "memory");
  out[5] = done;
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 2;" :: "r"(b) : "memory");
  out[6] = test(b, 1); out[7] = test(b, 0);
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(b) : "memory");
  init(b, 1);
  out[8] = test(b, 0); arrive(b); out[9] = test(b, 0);
}"""
    gpu = SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros(10, np.int32))
    run_cuda(source, 32, [out], gpu)
    assert gpu.to_host(out).tolist() == [1, 0, 0, 1, 0, 1, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("init(b, 0);", "allowed: 1 to"),
        ("init(b, 1); expect(b, 16); arrive(b);", "too many at an mbarrier whose phase 0"),
        ("arrive(b);", "no initialised mbarrier"),
        ('init(b, 1); asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(b)); arrive(b);', "no initialised"),
        (
            'init(b, 1); asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 1048576;" :: "r"(b));',
            "tx-count",
        ),
    ],
)
def test_misuse_of_an_mbarrier_is_named(body: str, message: str) -> None:
    source = 'extern "C" __global__ void k() { __shared__ u64 bar_; const u32 b = addr(&bar_);' + body + "}"
    with pytest.raises(SimulationError, match=message) as caught:
        run_cuda(source, 1, [], SimulatedGPU("sm_90a"))
    assert caught.value.kind == "mbarrier" and caught.value.source_line is not None


def test_a_warpgroup_instruction_needs_four_warps() -> None:
    source = 'extern "C" __global__ void k() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }'
    with pytest.raises(SimulationError, match="needs a warpgroup") as caught:
        run_cuda(source, 96, [], SimulatedGPU("sm_90a"))
    assert caught.value.kind == "barrier"


def test_warps_of_a_warpgroup_may_come_to_a_product_one_after_the_other() -> None:
    source = r"""
extern "C" __global__ void k(float *out, const float *in) {
  __shared__ __align__(1024) uint4 s[512];
  __shared__ __align__(16) float copied[4];
  __shared__ u64 bars[2];
  const int t = threadIdx.x, warp = t / 32;
  const u32 arrived = addr(bars), passed_on = arrived + 8;
  for (int i = t; i < 512; i += 128) s[i] = make_uint4(0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80);
  if (t == 0) { init(arrived, 1); init(passed_on, 32); init_fence(); }
  proxy_fence();
  __syncthreads();
  if (t == 0) {
    expect(arrived, 16);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
                 :: "r"(addr(copied)), "l"(in), "r"(arrived) : "memory");
  }
  float x = warp;
  if (warp == 1) { wait(arrived, 0); x = copied[0]; arrive(passed_on); }
  if (warp == 3) { wait(passed_on, 0); x = copied[1]; }
  float d[4] = {x, x, x, x};
  fence();
  mma(d, desc(addr(s)), desc(addr(s)), 1);
  commit();
  finish<0>();
  out[t] = d[0];
}"""
    gpu = SimulatedGPU("sm_90a")
    out = gpu.to_device(np.ones(128, np.float32))
    copied = gpu.to_device(np.array([10, 30, 0, 0], np.float32))
    run = run_cuda(source, 128, [out, copied], gpu, trace_warp=(0, 0))
    np.testing.assert_array_equal(gpu.to_host(out), 16 + np.repeat([0, 10, 2, 30], 32))
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    assert run.counters.instructions[product] == 4
    assert run.counters.tensor_flops == 2 * 64 * 8 * 16
    assert [step.opcode for step in run.trace or ()].count(product) == 1


def test_warpgroups_take_turns_at_named_barriers() -> None:
    """Ping-pong: one waits for its turn, works, and passes the turn on by arriving at the other's barrier."""
    source = r"""
extern "C" __global__ void k(int *out) {
  __shared__ int count;
  const int group = threadIdx.x / 128, own = 1 + group, other = 2 - group;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  if (group == 1) bar_arrive(other, 256);
  for (int turn = 0; turn < 4; ++turn) {
    bar(own, 256);
    if (threadIdx.x % 128 == 0) out[count++] = group;
    bar_arrive(other, 256);
  }
  if (group == 0) bar(own, 256);
}"""
    gpu = SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros(8, np.int32))
    run = run_cuda(source, 256, [out], gpu)
    assert gpu.to_host(out).tolist() == [0, 1] * 4
    assert run.counters.barriers == 1 + 9
