"""States of mbarriers: pending arrivals, and arrivals that must not be the last."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.simulator import SimulatedGPU, SimulationError

from .hopper_tools import compile_hopper

SOURCE = r"""
extern "C" __global__ void k(u32 *out) {
  __shared__ u64 bar; const u32 b = addr(&bar), t = threadIdx.x;
  if (t == 0) init(b, 64);
  __syncthreads();
  u64 state; u32 pending;
  asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], COUNT;" : "=l"(state) : "r"(b) : "memory");
  asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
  out[t] = pending;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(b) : "memory");
  asm volatile("{ .reg .pred p; A: mbarrier.try_wait.shared.b64 p, [%0], %1; @!p bra A; }"
               :: "r"(b), "l"(state) : "memory");
}
"""


def run(count: int) -> np.ndarray:
    gpu = SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros(32, np.uint32))
    gpu.load(compile_hopper(SOURCE.replace("COUNT", str(count)))).launch("k", 1, 32, 0, [out])
    return gpu.to_host(out)


def test_a_state_holds_the_arrivals_that_were_pending() -> None:
    assert sorted(run(1).tolist()) == list(range(33, 65))


def test_an_arrival_that_must_not_complete_the_phase_does_not() -> None:
    with pytest.raises(SimulationError, match=r"with \.noComplete is the last one") as caught:
        run(2)
    assert caught.value.kind == "mbarrier"


@pytest.mark.parametrize("suffix", ["min", "max", "min.abs", "max.NaN", "max.abs.NaN"])
def test_floats_are_reduced_over_the_warp(suffix: str) -> None:
    ptx = """.version 8.7
    .target sm_100a
    .address_size 64
    .visible .entry k(.param .u64 out, .param .u64 in) {
    .reg .b64 %o, %i; .reg .b32 %t, %v; ld.param.u64 %o, [out]; ld.param.u64 %i, [in];
    mov.u32 %t, %tid.x; mad.wide.u32 %o, %t, 4, %o; mad.wide.u32 %i, %t, 4, %i; ld.global.b32 %v, [%i];
    redux.sync.SUFFIX.f32 %v, %v, -1; st.global.b32 [%o], %v; ret; }"""
    values = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    values[40], values[64:] = np.nan, np.nan
    gpu = SimulatedGPU("sm_90a")
    out = gpu.to_device(np.zeros_like(values))
    gpu.load(ptx.replace("SUFFIX", suffix)).launch("k", 1, 96, 0, [out, gpu.to_device(values)])
    warps = np.abs(values.reshape(3, 32)) if "abs" in suffix else values.reshape(3, 32)
    with np.errstate(all="ignore"):
        function = {"min": np.fmin, "max": np.fmax}[suffix[:3]] if "NaN" not in suffix else np.maximum
        np.testing.assert_array_equal(gpu.to_host(out).reshape(3, 32)[:, 0], function.reduce(warps, axis=1))
