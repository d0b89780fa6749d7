"""Finding the KV loop in PTX and machine code, and sorting its instructions by what they are for."""

from __future__ import annotations

import stat

import pytest
from explain_cases import EAGER, explained

from flashwright import compile_kernel, parse_kernel_name_into_config
from flashwright.workbench.explain import disassembly
from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_ptx, kind_of_sass
from flashwright.workbench.explain.loop import innermost_loop, ptx_listing, sass_loop, sass_mix

# A small loop, a larger one with a block out of line, padding, and the branch to itself that ends every kernel.
SASS = """
	.section	.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0020*/               @P1 BRA `(.L_x_0) ;
.L_x_1:
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/              @!PT LDS RZ, [RZ] ;
        /*0050*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0060*/               @P2 BRA `(.L_x_3) ;
.L_x_2:
        /*0070*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0080*/              @!P0 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   FMUL R8, R8, R9 ;
        /*00b0*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_4);
.L_x_5:
"""

NESTED_PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry nested()
{
    .reg .b32 %r<3>;
    .reg .pred %p<3>;
    mov.u32 %r1, 0;
$outer:
    mov.u32 %r2, 0;
$inner:
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, 4;
    @%p1 bra $inner;
    add.u32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, 4;
    @%p2 bra $outer;
    ret;
}
"""


def test_a_loop_of_machine_code_includes_blocks_out_of_line():
    loop = sass_loop(SASS, [Kind.MMA])
    assert [line.opcode for line in loop.body] == [
        "BAR.SYNC.DEFER_BLOCKING",
        "NOP",
        "LDSM.16.M88.4",
        "BRA",
        "HMMA.16816.F32.BF16",
        "BRA",
        "FMUL",
        "BRA",
    ]
    assert loop.header.opcode == "BAR.SYNC.DEFER_BLOCKING"
    assert sass_mix(loop).by_kind["matrix product (mma)"] == 1


def test_an_outer_loop_includes_its_inner_one():
    loop = innermost_loop(ptx_listing(NESTED_PTX, "nested"), kind_of_ptx, [Kind.MOVE])
    assert len(loop.body) == 7
    assert loop.header.opcode == "mov.u32"


def test_of_nested_loops_the_innermost_with_the_instructions_asked_for_is_taken():
    listing = ptx_listing(NESTED_PTX, "nested")
    inner, outer = (innermost_loop(listing, kind_of_ptx, kinds) for kinds in ([Kind.INTEGER], [Kind.MOVE]))
    assert len(inner.body) < len(outer.body)
    assert set(inner.body) < set(outer.body)


def test_code_without_a_loop_is_refused():
    with pytest.raises(ValueError, match="has no loop"):
        sass_loop("        /*0000*/                   EXIT ;\n")


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("cp.async.cg.shared.global", Kind.COPY),
        ("cp.async.wait_group", Kind.WAIT),
        ("cp.async.bulk.tensor.2d.shared::cluster.global", Kind.COPY),
        ("mbarrier.try_wait.parity.shared.b64", Kind.WAIT),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", Kind.MMA),
        ("wgmma.wait_group.sync.aligned", Kind.PRODUCT_WAIT),
        ("mbarrier.try_wait.parity.shared::cta.b64", Kind.WAIT),
        ("bar.sync", Kind.BARRIER),
        ("bar.red.or.pred", Kind.VOTE),
        ("barrier.cta.red.popc.u32", Kind.VOTE),
        ("bar.warp.sync", Kind.SHUFFLE),
        ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", Kind.LOAD),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", Kind.MMA),
        ("ex2.approx.ftz.f32", Kind.EXPONENTIAL),
        ("fma.rn.f32", Kind.FLOAT),
        ("max.f32", Kind.FLOAT),
        ("cvt.rn.bf16x2.f32", Kind.CONVERT),
        ("cvt.s64.s32", Kind.INTEGER),
        ("mov.f32", Kind.MOVE),
        ("setp.gt.f32", Kind.CONTROL),
        ("or.pred", Kind.CONTROL),
        ("st.shared.v4.b32", Kind.SHARED),
        ("ld.global.v4.b32", Kind.GLOBAL),
        ("st.local.b32", Kind.LOCAL),
    ],
)
def test_ptx_is_sorted_by_what_it_is_for(opcode, kind):
    assert kind_of_ptx(opcode) is kind


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("LDGSTS.E.BYPASS.128", Kind.COPY),
        ("LDGDEPBAR", Kind.WAIT),
        ("LDG.E.128", Kind.GLOBAL),
        ("LDSM.16.MT88.4", Kind.LOAD),
        ("LDS", Kind.SHARED),
        ("BAR.SYNC.DEFER_BLOCKING", Kind.BARRIER),
        ("BAR.RED.OR.DEFER_BLOCKING", Kind.VOTE),
        ("HMMA.16816.F32.BF16", Kind.MMA),
        ("MUFU.EX2", Kind.EXPONENTIAL),
        ("MUFU.RCP", Kind.FLOAT),
        ("F2FP.BF16.F32.PACK_AB", Kind.CONVERT),
        ("IMAD.MOV.U32", Kind.MOVE),
        ("IMAD.WIDE.U32", Kind.INTEGER),
        ("FSETP.GT.AND", Kind.CONTROL),
        ("STL.64", Kind.LOCAL),
    ],
)
def test_machine_code_is_sorted_by_what_it_is_for(opcode, kind):
    assert kind_of_sass(opcode) is kind


def test_no_instruction_of_a_kernel_is_of_an_unknown_kind():
    assert Kind.OTHER.value not in explained(EAGER).loop.ptx.by_kind


def test_without_a_disassembler_the_facts_say_how_to_get_one(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(disassembly, "find_spec", lambda name: None)
    with pytest.raises(disassembly.DisassemblyError, match="pip install nvidia-cuda-nvdisasm"):
        disassembly.disassemble(b"")


def test_a_disassembler_on_the_path_is_used(monkeypatch, tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\ntest "$1" = -c && test "$(cat "$2")" = cubin && echo listing\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert disassembly.disassemble(b"cubin") == "listing\n"


def test_a_disassembler_that_fails_is_quoted(monkeypatch, tmp_path):
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho 'nvdisasm fatal: not a cubin' >&2\nexit 1\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(disassembly.DisassemblyError, match="not a cubin"):
        disassembly.disassemble(b"")


def test_machine_code_of_a_kernel_has_the_products_of_its_ptx():
    if disassembly.find_disassembler() is None:
        pytest.skip(disassembly.NOT_FOUND)
    kernel = compile_kernel(parse_kernel_name_into_config(EAGER))
    mix = sass_mix(sass_loop(disassembly.disassemble(kernel.cubin)))
    by_kind = mix.by_kind
    for kind in (Kind.MMA, Kind.LOAD, Kind.COPY, Kind.BARRIER, Kind.EXPONENTIAL):
        assert by_kind[kind.value] == explained(EAGER).loop.ptx.by_kind[kind.value]
    assert {opcode for opcode in mix.by_opcode if kind_of_sass(opcode) is Kind.OTHER} <= {"NOP"}
