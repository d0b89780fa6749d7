"""cp.async.mbarrier.arrive: an mbarrier hears of asynchronous copies."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.simulator import SimulatedGPU, SimulationError

from .hopper_tools import PRELUDE
from .tools import compile_cuda

# Warps 0 and 1 copy 16 bytes per thread, warp 2 waits at the mbarrier and shows them.
SOURCE = (
    PRELUDE
    + r"""
extern "C" __global__ void k(const uint4 *in, uint4 *out) {
  __shared__ __align__(16) uint4 s[64];
  __shared__ u64 bar;
  const u32 b = addr(&bar);
  const int t = threadIdx.x;
  if (t == 0) { init(b, EXPECTED); init_fence(); }
  __syncthreads();
  if (t < 64) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(addr(&s[t])), "l"(in + t) : "memory");
    ARRIVE
  } else {
    WAIT
    out[t - 64] = s[t - 64];
    out[t - 32] = s[t - 32];
  }
}
"""
)
ARRIVE = 'asm volatile("cp.async.mbarrier.arrive.MODE.b64 [%0];" :: "r"(b) : "memory");'
WAIT = "wait(b, 0);"


def run(mode: str, expected: int, arrive: str = ARRIVE, wait: str = WAIT) -> tuple[np.ndarray, np.ndarray]:
    source = SOURCE.replace("ARRIVE", arrive).replace("WAIT", wait).replace("MODE", mode)
    gpu = SimulatedGPU("sm_90a")
    data = np.arange(256, dtype=np.uint32).reshape(64, 4)
    out = gpu.to_device(np.zeros_like(data))
    module = gpu.load(compile_cuda(source.replace("EXPECTED", str(expected)), "sm_90a"))
    module.launch("k", 1, 96, 0, [gpu.to_device(data), out])
    return gpu.to_host(out), data


def test_whoever_waits_sees_the_copies() -> None:
    out, data = run("noinc.shared::cta", 64)
    assert (out == data).all()


def test_arrivals_that_are_not_expected_are_counted_by_themselves() -> None:
    """The mbarrier expects the threads' own arrivals, which follow; the copies' come on top."""
    out, data = run("shared", 64, ARRIVE + " arrive(b);")
    assert (out == data).all()


def test_without_the_wait_the_copies_are_not_there() -> None:
    with pytest.raises(SimulationError) as caught:
        run("noinc.shared::cta", 64, wait="")
    assert caught.value.kind == "async-copy"


def test_an_ordinary_arrival_does_not_wait_for_the_copies() -> None:
    with pytest.raises(SimulationError) as caught:
        run("", 64, arrive="arrive(b);")
    assert caught.value.kind == "async-copy"


def test_an_mbarrier_that_expects_more_than_the_copies_never_completes() -> None:
    with pytest.raises(SimulationError, match="arrivals") as caught:
        run("noinc.shared::cta", 65)
    assert caught.value.kind == "deadlock"


def test_stores_after_the_arrival_are_not_part_of_it() -> None:
    """The copier writes on after its arrival: whoever waits for the copies has not seen that."""
    later = ARRIVE + ' if (t == 0) asm volatile("st.shared.b32 [%0], 1;" :: "r"(addr(&bar) + 8) : "memory");'
    wait = WAIT + ' asm volatile("{ .reg .b32 x; ld.shared.b32 x, [%0]; }" :: "r"(addr(&bar) + 8) : "memory");'
    source = SOURCE.replace("__shared__ u64 bar;", "__shared__ u64 both[2]; u64 &bar = both[0];")
    gpu = SimulatedGPU("sm_90a")
    text = source.replace("ARRIVE", later).replace("WAIT", wait).replace("MODE", "noinc.shared::cta")
    module = gpu.load(compile_cuda(text.replace("EXPECTED", "64"), "sm_90a"))
    data = gpu.to_device(np.zeros((64, 4), np.uint32))
    with pytest.raises(SimulationError) as caught:
        module.launch("k", 1, 96, 0, [data, data])
    assert caught.value.kind == "race"
