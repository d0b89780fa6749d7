"""The trace of a warp: what it executed, and the addresses it gave to memory."""

from __future__ import annotations

import numpy as np

from .tools import launch

COPY_PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 out, .param .u64 in)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<6>;
    .reg .f32 %f<3>;
    .reg .pred %p<2>;
    .shared .align 16 .b8 tile[256];
    ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [in];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    mov.u32 %r2, tile;
    mad.lo.s32 %r3, %r1, 4, %r2;
    st.shared.f32 [%r3], %f1;
    setp.eq.u32 %p1, %r1, 33;
    @%p1 ld.shared.f32 %f2, [%r3];
    add.s64 %rd5, %rd1, %rd3;
    st.global.f32 [%rd5], %f1;
    ret;
}
"""


def test_a_trace_holds_the_addresses_of_the_traced_warp_only():
    outputs = {"out": np.zeros(64, np.float32)}
    run = launch(COPY_PTX, 64, outputs, np.arange(64, dtype=np.float32), trace_warp=(0, 1))
    accesses = {entry.opcode: entry.accesses for entry in run.trace if entry.accesses}
    assert list(accesses) == ["ld.global.f32", "st.shared.f32", "ld.shared.f32", "st.global.f32"]
    (store,) = accesses["st.shared.f32"]
    assert (store.space, store.width) == ("shared", 4)
    assert store.address_of_lane == {lane: 4 * (32 + lane) for lane in range(32)}
    (load,) = accesses["ld.global.f32"]
    assert load.space == "global" and np.ptp(list(load.address_of_lane.values())) == 31 * 4
    (one_lane,) = accesses["ld.shared.f32"]
    assert one_lane.address_of_lane == {1: 4 * 33}


def test_a_trace_quotes_its_instructions():
    outputs = {"out": np.zeros(64, np.float32)}
    run = launch(COPY_PTX, 64, outputs, np.zeros(64, np.float32), trace_warp=(0, 0))
    assert [entry.text for entry in run.trace][-1] == "ret"
    assert "ld.global.f32 %f1, [%rd4]" in [entry.text for entry in run.trace]
