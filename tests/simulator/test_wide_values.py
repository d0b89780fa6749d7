"""Registers of 128 bits, and the constants that PTX predefines."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.simulator import SimulatedGPU

from .tools import HEADER

THREADS = 64


def run(body: str, values: np.ndarray, registers: str = "") -> np.ndarray:
    """``body`` for 64 threads: %in and %out are the addresses of the thread's 16 bytes, %q registers of 128 bits."""
    ptx = (
        HEADER
        + f"""
    .visible .entry k(.param .u64 out, .param .u64 in) {{
    .shared .align 16 .b8 memory[1024];
    .reg .b128 %q<4>; .reg .b64 %out, %in, %lo, %hi; .reg .b32 %t, %s, %r<4>; .reg .pred %p; {registers}
    ld.param.u64 %out, [out]; ld.param.u64 %in, [in];
    mov.u32 %t, %tid.x; mov.u32 %s, memory; mad.lo.u32 %s, %t, 16, %s;
    mad.wide.u32 %out, %t, 16, %out; mad.wide.u32 %in, %t, 16, %in;
    {body}
    ret; }}"""
    )
    gpu = SimulatedGPU("sm_90")
    out = gpu.to_device(np.zeros_like(values))
    gpu.load(ptx).launch("k", 1, THREADS, 0, [out, gpu.to_device(values)])
    return gpu.to_host(out)


VALUES = np.random.default_rng(0).integers(0, 2**64, (THREADS, 2), np.uint64)


@pytest.mark.parametrize(
    "body",
    [
        "ld.global.b128 %q0, [%in]; st.global.b128 [%out], %q0;",
        "ld.global.b128 %q0, [%in]; mov.b128 %q1, %q0; st.shared.b128 [%s], %q1; "
        "ld.shared.b128 %q2, [%s]; st.global.b128 [%out], %q2;",
        "ld.global.v2.b64 {%lo, %hi}, [%in]; mov.b128 %q0, {%lo, %hi}; st.global.b128 [%out], %q0;",
        "ld.global.b128 %q0, [%in]; mov.b128 {%lo, %hi}, %q0; st.global.v2.b64 [%out], {%lo, %hi};",
        "ld.b128 %q0, [%in]; st.b128 [%out], %q0;",
    ],
)
def test_128_bits_move_through_registers(body: str) -> None:
    assert (run(body, VALUES) == VALUES).all()


def test_128_bits_move_in_the_threads_that_a_guard_chooses() -> None:
    body = """ld.global.b128 %q0, [%in]; setp.lt.u32 %p, %t, 20; mov.b64 %lo, 5; mov.b64 %hi, 6;
              mov.b128 %q1, {%lo, %hi}; @%p mov.b128 %q1, %q0; st.global.b128 [%out], %q1;"""
    out = run(body, VALUES)
    assert (out[:20] == VALUES[:20]).all()
    assert (out[20:] == [5, 6]).all()


def test_128_bits_are_exchanged_and_compared_atomically() -> None:
    swapped = run("ld.global.b128 %q0, [%in]; st.global.b128 [%out], %q0; atom.global.exch.b128 %q1, [%in], %q2; "
                  "st.global.b128 [%out], %q1;", VALUES)  # fmt: skip
    assert (swapped == VALUES).all()
    body = """ld.global.b128 %q0, [%in]; st.shared.b128 [%s], %q0; setp.lt.u32 %p, %t, 10;
              mov.b64 %lo, 1; mov.b64 %hi, 2; mov.b128 %q1, {%lo, %hi}; mov.b128 %q2, %q0; @%p mov.b128 %q2, %q1;
              atom.shared.cas.b128 %q3, [%s], %q2, %q1; ld.shared.b128 %q3, [%s]; st.global.b128 [%out], %q3;"""
    out = run(body, VALUES)
    assert (out[:10] == VALUES[:10]).all()  # the first ten compared with something else
    assert (out[10:] == [1, 2]).all()


def test_the_warp_size_is_a_constant_of_the_language() -> None:
    body = """mov.u32 %r0, WARP_SZ; add.s32 %r1, %r0, WARP_SZ; cvt.u64.u32 %lo, %r1; cvt.u64.u32 %hi, %r0;
              st.global.b64 [%out], %lo; st.global.b64 [%out+8], %hi;"""
    assert (run(body, VALUES) == [64, 32]).all()
