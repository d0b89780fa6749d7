"""What cannot be executed is refused kernel by kernel, everything at once, in words."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flashwright.simulator import SimulatedGPU, SimulationError, registry
from flashwright.simulator.binding import Binder
from flashwright.simulator.ptx.syntax import Instruction

from .tools import HEADER

GOOD = """.visible .entry good(.param .u64 out) { .reg .b64 %rd<1>; .reg .b32 %r<1>; ld.param.u64 %rd0, [out];
mov.u32 %r0, 7; st.global.b32 [%rd0], %r0; ret; }
"""
BAD = """.visible .entry bad() { .reg .b32 %r<9>; .reg .b64 %rd<2>;
frobnicate.b32 %r0, %r1;
mov.u32 %r1, %nonsense;
call helper;
call undefined_function;
ret; }
"""
HELPER = """.func helper() { .reg .b32 %r<2>; .reg .b256 %x;
tcgen05.wait::ld.sync.aligned;
ret; }
"""


def test_one_unsupported_instruction_refuses_its_kernel_and_not_the_module() -> None:
    gpu = SimulatedGPU()
    module = gpu.load(HEADER + HELPER + BAD + GOOD)
    assert module.kernels == ["bad", "good"]
    assert list(module.refused) == ["bad"]
    out = gpu.to_device(np.zeros(1, np.int32))
    module.launch("good", 1, 32, 0, [out])
    assert gpu.to_host(out)[0] == 7
    with pytest.raises(SimulationError) as caught:
        module.launch("bad", 1, 32)
    assert caught.value is module.refused["bad"]


def test_all_problems_of_a_kernel_are_listed_with_their_lines() -> None:
    error = SimulatedGPU().load(HEADER + HELPER + BAD + GOOD).refused["bad"]
    assert error.kind == "unsupported" and error.kernel == "bad"
    lines = {int(line): text for line, text in re.findall(r"PTX line (\d+): (.*)", error.detail)}
    assert error.detail.startswith("5 things") and error.ptx_line == 4
    assert "registers of type .b256" in lines[4]
    assert "`tcgen05.wait::ld.sync.aligned`: unknown instruction" in lines[5]
    assert "`frobnicate.b32 %r0, %r1`: unknown instruction" in lines[8]
    assert "%nonsense" in lines[9]
    assert "unknown function" in lines[11]


def test_a_module_of_which_no_kernel_can_run_is_refused_at_load() -> None:
    with pytest.raises(SimulationError, match="frobnicate"):
        SimulatedGPU().load(HEADER + HELPER + BAD)


@pytest.mark.parametrize(
    "instruction",
    [
        "mov.u32 %r1;",
        "add.u32 %r1, %r2, %r3, %r4;",
        "ld.global.u32 %r1, %r2;",
        "shfl.sync.sideways.b32 %r1, %r2, 1, 31, -1;",
        "vote.sync.none.pred %p1, %p2, -1;",
        "cvt.u32 %r1, %r2;",
        "setp.u32 %p1, %r1, %r2;",
        "atom.global.frob.b32 %r1, [%rd1], %r2;",
        "red.global.u32 [%rd1], %r2;",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r2};",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16 {%r1}, [%r2];",
        "bar.sideways 0;",
        "mbarrier.try_wait.parity.b64 %p1;",
        "cp.async.ca.shared.global [%r1], [%rd1];",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1];",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.f32 [%rd1], [%r1], 16;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1};",
        "prmt.b32 %r1, %r2;",
        "lop3.b32 %r1, %r2, %r2, %r2, %r2;",
        "slct.u32 %r1, %r2, %r2, %r2;",
        "isspacep.nowhere %p1, %rd1;",
        "cvta.nowhere.u64 %rd1, %rd1;",
        "bra 5;",
        "bra NOWHERE;",
        "brx.idx %r1, NOWHERE;",
        "redux.sync.sub.u32 %r1, %r2, -1;",
        "bfe.u32 %r1, %r2;",
        "elect.sync %r1, -1;",
        "tensormap.replace.tile.nothing.global.b1024.b32 [%rd1], %r1;",
        "setmaxnreg.inc.sync.aligned.u32 %r1;",
        "dp4a.u32 %r1, %r2, %r2, %r2;",
        "sub.f16x2 %r1, %r2;",
        "fma.rn.bf16x2 %r1, %r2, %r3;",
        "fma.rn.f32x2 %rd1, %rd2;",
        "mul.rna.f32 %r1, %r2, %r3;",
        "cvt.rm.tf32.f32 %r1, %r2;",
        "add.u32 %r1, %r2, %q1;",
        "atom.global.add.f32 %r1, [%rd1], %r2, %r3;",
        "red.shared.max.s32 [%r1];",
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1];",
        "mbarrier.init.shared.b64 [%r1], %r2, %r3;",
        "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r1], {%r2};",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r2}, [%r1];",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1}, {%r1, %r2}, {%r1}, {%r1, %r2, %r3, %r4};",
        "call;",
    ],
)
def test_a_form_that_is_not_understood_is_refused_without_the_words_of_python(instruction: str) -> None:
    registers = ".reg .b32 %r<5>; .reg .b64 %rd<3>; .reg .pred %p<3>; .reg .b128 %q<2>;"
    with pytest.raises(SimulationError) as caught:
        SimulatedGPU("sm_90").load(HEADER + f".visible .entry k() {{\n{registers}\n{instruction}\nret;\n}}")
    assert caught.value.kind == "unsupported" and caught.value.ptx_line == 6
    assert not re.search(r"Error|Exception|unpack|NoneType|Traceback|object", str(caught.value))


def test_a_fault_of_the_simulator_in_a_run_is_refused_in_words_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(syntax: Instruction, bind: Binder) -> object:
        return lambda wave: {}["a key that is missing"]

    monkeypatch.setitem(registry._DECODERS, "frobnicate", [(None, decode)])
    module = SimulatedGPU().load(HEADER + ".visible .entry k() { .reg .b32 %r<2>;\nfrobnicate.b32 %r0, %r1;\nret; }")
    with pytest.raises(SimulationError, match="a form that the simulator does not know") as caught:
        module.launch("k", 1, 32)
    assert caught.value.kind == "unsupported" and caught.value.ptx_line == 5
    assert "key" not in str(caught.value) and isinstance(caught.value.__cause__, KeyError)


def test_textures_of_other_kernels_do_not_matter() -> None:
    texture = """.global .texref t;
    .visible .entry sample() { .reg .f32 %f<4>; tex.1d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [t, {%f0}]; ret; }
    """
    module = SimulatedGPU().load(HEADER + texture + GOOD)
    assert list(module.refused) == ["sample"]
