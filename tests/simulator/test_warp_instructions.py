"""Exchange and agreement within a warp."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.simulator.errors import SimulationError

from .tools import HEADER, compile_cuda, launch

LANES = np.arange(32)


def run_warp(body: str, *inputs: object, arch: str = "sm_90", block: int = 32) -> np.ndarray:
    """``out[thread]`` of a kernel with ``v = 3 * thread + 1`` and ``lane``."""
    ptx = compile_cuda(
        f"""extern "C" __global__ void k(unsigned *out) {{
            unsigned lane = threadIdx.x % 32, v = 3 * threadIdx.x + 1, r = 0;
            {body}
            out[threadIdx.x] = r; }}""",
        arch,
    )
    outputs = {"out": np.zeros(block, np.uint32)}
    launch(ptx, block, outputs, *inputs, arch=arch)
    return outputs["out"]


@pytest.mark.parametrize(
    ("call", "source"),
    [
        ("__shfl_sync(~0u, v, 7)", np.full(32, 7)),
        ("__shfl_sync(~0u, v, lane + 1)", (LANES + 1) % 32),
        ("__shfl_sync(~0u, v, 3, 8)", LANES // 8 * 8 + 3),
        ("__shfl_up_sync(~0u, v, 5)", np.where(LANES >= 5, LANES - 5, LANES)),
        ("__shfl_up_sync(~0u, v, 2, 8)", np.where(LANES % 8 >= 2, LANES - 2, LANES)),
        ("__shfl_down_sync(~0u, v, 9)", np.where(LANES + 9 < 32, LANES + 9, LANES)),
        ("__shfl_down_sync(~0u, v, 3, 16)", np.where(LANES % 16 + 3 < 16, LANES + 3, LANES)),
        ("__shfl_xor_sync(~0u, v, 12)", LANES ^ 12),
        ("__shfl_xor_sync(~0u, v, 1, 2)", LANES ^ 1),
    ],
)
def test_shuffles(call: str, source: np.ndarray) -> None:
    assert (run_warp(f"r = {call};") == 3 * source + 1).all()


def test_shuffle_of_part_of_the_warp_and_from_an_absent_lane() -> None:
    found = run_warp("if (lane < 8) r = __shfl_xor_sync(0xffu, v, 1); else r = 5;")
    assert (found == np.where(LANES < 8, 3 * (LANES ^ 1) + 1, 5)).all()
    absent = run_warp("if (lane < 8) r = __shfl_sync(0xffu, v, 20);")
    assert (absent[:8] == 0x7FFFDEAD).all()  # undefined by PTX: made visible


def test_lanes_wait_for_each_other_at_a_sync_instruction() -> None:
    # Lanes 16…31 reach the vote later, through another path; all 32 are named, so all must meet.
    found = run_warp("if (lane >= 16) for (unsigned i = 0; i < lane; ++i) v += i; r = __ballot_sync(~0u, v & 1);")
    assert len(set(found.tolist())) == 1


@pytest.mark.parametrize(
    ("call", "reference"),
    [
        ("__ballot_sync(~0u, lane % 3 == 0)", sum(1 << i for i in range(0, 32, 3))),
        ("__all_sync(~0u, lane < 32)", 1),
        ("__all_sync(~0u, lane < 31)", 0),
        ("__any_sync(~0u, lane == 9)", 1),
        ("__any_sync(~0u, lane == 99)", 0),
        ("__reduce_add_sync(~0u, lane)", 496),
        ("__reduce_max_sync(~0u, lane ^ 5)", 31),
        ("__reduce_min_sync(~0u, lane + 3)", 3),
        ("__reduce_xor_sync(~0u, lane)", 0),
        ("__reduce_and_sync(~0u, lane | 64)", 64),
        ("__activemask()", 0xFFFFFFFF),
    ],
)
def test_votes_and_reductions(call: str, reference: int) -> None:
    assert (run_warp(f"r = {call};") == reference).all()


def test_match() -> None:
    found = run_warp("r = __match_any_sync(~0u, lane % 4);")
    assert found.tolist() == [0x11111111 << (lane % 4) for lane in range(32)]
    same = run_warp("int p; r = __match_all_sync(~0u, 7, &p); r = r == ~0u && p;")
    other = run_warp("int p; r = __match_all_sync(~0u, lane, &p); r = r == 0 && !p;")
    assert same.all() and other.all()


def test_groups_of_lanes_agree_among_themselves() -> None:
    mask = "0xffu << (lane / 8 * 8)"
    assert run_warp(f"r = __reduce_add_sync({mask}, lane);").tolist() == [28 + 64 * (t // 8) for t in range(32)]
    assert run_warp(f"r = __any_sync({mask}, lane == 9);").tolist() == [int(t // 8 == 1) for t in range(32)]
    assert run_warp(f"r = __all_sync({mask}, lane < 16);").tolist() == [int(t < 16) for t in range(32)]
    assert run_warp(f"r = __ballot_sync({mask}, lane % 2);").tolist() == [0xAA << (t // 8 * 8) for t in range(32)]
    assert run_warp(f"r = __match_any_sync({mask}, lane % 8 / 4);").tolist() == [0xF << (t // 4 * 4) for t in range(32)]


def test_a_complete_group_of_lanes_does_not_wait_for_another_group() -> None:
    body = """
    unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
    if (lane == 31) v = 0; // the second half is complete only when this lane comes
    r = __reduce_max_sync(half, v);"""
    assert run_warp(body).tolist() == [46] * 16 + [91] * 16


def test_lane_masks_and_warp_numbers() -> None:
    body = 'unsigned m; asm("mov.u32 %0, %lanemask_{};" : "=r"(m)); r = m;'
    assert run_warp(body.format("lt")).tolist() == [(1 << lane) - 1 for lane in range(32)]
    assert run_warp(body.format("eq")).tolist() == [1 << lane for lane in range(32)]
    warp = run_warp('asm volatile("mov.u32 %0, %warpid;" : "=r"(r));', block=96)
    assert warp.tolist() == [t // 32 for t in range(96)]


def test_elect_chooses_one_lane() -> None:
    body = """{ .reg .pred p; .reg .b32 l; elect.sync l|p, 0xffffffff; selp.u32 %0, 1, 0, p; }"""
    assert run_warp(f'asm volatile("{body}" : "=r"(r));').tolist() == [1] + [0] * 31


def test_shuffle_that_waits_for_a_lane_that_never_comes() -> None:
    ptx = (
        HEADER
        + """.visible .entry k() {
        .reg .b32 %r<4>; .reg .pred %p<2>;
        mov.u32 %r1, %laneid;
        setp.lt.u32 %p1, %r1, 16;
        @%p1 bra LOW;
        bar.warp.sync 0xffff0000;
        shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xffffffff;
        ret;
        LOW: vote.sync.any.pred %p1, %p1, 0xffffffff;
        ret; }"""
    )
    with pytest.raises(SimulationError) as caught:
        launch(ptx, 32, {})
    assert caught.value.kind == "barrier"
    assert "never arrive" in caught.value.detail
