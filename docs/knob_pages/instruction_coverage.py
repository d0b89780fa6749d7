"""Which instructions of the PTX ISA the simulator executes, found by loading a kernel with each of their forms."""

from __future__ import annotations

from functools import cache

from flashwright.simulator import SimulatedGPU

from .markdown import table

_HEADER = """.version 8.7
.target sm_90a
.address_size 64
.global .align 128 .b8 g[1024];
.global .texref texture;
.global .surfref surface;
.func function() { ret; }
"""
_DECLARATIONS = """.shared .align 128 .b8 s[1024];
.reg .pred %p<4>; .reg .b8 %c<4>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %d<8>; .reg .b128 %q<4>;"""


def _each(opcodes: str, operands: str) -> list[str]:
    return [f"{opcode} {operands}" for opcode in opcodes.split()]


def _vector(first: int, count: int, letter: str = "r") -> str:
    return "{" + ", ".join(f"%{letter}{first + index}" for index in range(count)) + "}"


_R3, _R4, _D3, _H3 = "%r1, %r2, %r3", "%r1, %r2, %r3, %r4", "%d1, %d2, %d3", "%h1, %h2, %h3"
_HALF_TYPES = ("f16", "f16x2", "bf16", "bf16x2")


def _half(opcode: str, sources: int) -> list[str]:
    """A form for each 16-bit type; ``opcode`` has a place for it."""
    return [
        f"{opcode.format(name)} " + ", ".join(f"%{'r' if 'x2' in name else 'h'}{i}" for i in range(1, sources + 2))
        for name in _HALF_TYPES
    ]


def _mma(shape: str, types: str, counts: tuple[int, int, int], suffix: str = "", letters: str = "rrr") -> str:
    d, a, b = (_vector(1 + 8 * number, count, letters[number]) for number, count in enumerate(counts))
    return f"mma.sync.aligned.{shape}.row.col.{types}{suffix} {d}, {a}, {b}, {d}"


# PTX ISA, chapter "Instructions": section → instruction → forms, of the newest architectures too.
FORMS: dict[str, dict[str, list[str]]] = {
    "Integer arithmetic": {
        "add": [
            *_each("add.s32 add.sat.s32 add.u16x2 add.s16x2", _R3),
            "add.u64 " + _D3,
            "add.s16 " + _H3,
        ],
        "sub": ["sub.u32 " + _R3, "sub.sat.s32 " + _R3, "sub.s64 " + _D3],
        "mul": ["mul.lo.u32 " + _R3, "mul.hi.s64 " + _D3, "mul.wide.u16 %r1, %h2, %h3"],
        "mad": ["mad.lo.s32 " + _R4, "mad.hi.sat.s32 " + _R4, "mad.wide.u32 %d1, %r2, %r3, %d4"],
        "mul24": _each("mul24.lo.u32 mul24.hi.s32", _R3),
        "mad24": ["mad24.lo.u32 " + _R4, "mad24.hi.sat.s32 " + _R4],
        "sad": ["sad.u32 " + _R4],
        "div": ["div.s32 " + _R3],
        "rem": ["rem.u64 " + _D3],
        "abs": ["abs.s32 %r1, %r2"],
        "neg": ["neg.s64 %d1, %d2"],
        "min": [*_each("min.u32 min.s16x2 min.relu.s32 min.relu.s16x2", _R3), "min.s64 " + _D3],
        "max": [*_each("max.u32 max.u16x2 max.relu.s32", _R3), "max.s64 " + _D3],
        "popc": ["popc.b64 %r1, %d1"],
        "clz": ["clz.b32 %r1, %r2"],
        "bfind": ["bfind.u32 %r1, %r2", "bfind.shiftamt.s64 %r1, %d1"],
        "fns": ["fns.b32 " + _R4],
        "brev": ["brev.b32 %r1, %r2"],
        "bfe": ["bfe.s32 " + _R4, "bfe.u64 %d1, %d2, %r1, %r2"],
        "bfi": ["bfi.b32 %r1, %r2, %r3, %r4, %r5"],
        "szext": ["szext.wrap.s32 " + _R3, "szext.clamp.u32 " + _R3],
        "bmsk": ["bmsk.clamp.b32 " + _R3],
        "dp4a": ["dp4a.s32.u32 " + _R4],
        "dp2a": ["dp2a.lo.s32.u32 " + _R4],
    },
    "Extended-precision integer arithmetic": {
        "add.cc": ["add.cc.u32 " + _R3, "add.cc.u64 " + _D3],
        "addc": ["addc.cc.u32 " + _R3],
        "sub.cc": ["sub.cc.u32 " + _R3],
        "subc": ["subc.u64 " + _D3],
        "mad.cc": ["mad.lo.cc.u32 " + _R4],
        "madc": ["madc.hi.cc.u64 %d1, %d2, %d3, %d4"],
    },
    "Floating point": {
        "testp": ["testp.finite.f32 %p1, %r1"],
        "copysign": ["copysign.f64 " + _D3],
        "add": [*_each("add.f32 add.rz.ftz.sat.f32", _R3), "add.rp.f64 " + _D3, "add.rn.f32x2 " + _D3],
        "sub": ["sub.rm.f32 " + _R3, "sub.f64 " + _D3, "sub.rn.f32x2 " + _D3],
        "mul": ["mul.ftz.f32 " + _R3, "mul.rz.f64 " + _D3, "mul.rn.f32x2 " + _D3],
        "fma": ["fma.rp.sat.f32 " + _R4, "fma.rm.f64 %d1, %d2, %d3, %d4", "fma.rn.f32x2 %d1, %d2, %d3, %d4"],
        "mad": ["mad.rn.f32 " + _R4],
        "div": [*_each("div.approx.f32 div.full.ftz.f32 div.rm.f32", _R3), "div.rz.f64 " + _D3],
        "abs": ["abs.ftz.f32 %r1, %r2"],
        "neg": ["neg.f64 %d1, %d2"],
        "min": [*_each("min.NaN.f32 min.xorsign.abs.f32", _R3), "min.f32 " + _R4],
        "max": ["max.ftz.f32 " + _R3, "max.f64 " + _D3],
        "rcp": ["rcp.approx.ftz.f32 %r1, %r2", "rcp.rz.f64 %d1, %d2", "rcp.approx.ftz.f64 %d1, %d2"],
        "sqrt": ["sqrt.approx.f32 %r1, %r2", "sqrt.rp.f64 %d1, %d2"],
        "rsqrt": ["rsqrt.approx.f32 %r1, %r2", "rsqrt.approx.ftz.f64 %d1, %d2"],
        "sin": ["sin.approx.f32 %r1, %r2"],
        "cos": ["cos.approx.ftz.f32 %r1, %r2"],
        "lg2": ["lg2.approx.f32 %r1, %r2"],
        "ex2": ["ex2.approx.ftz.f32 %r1, %r2"],
        "tanh": ["tanh.approx.f32 %r1, %r2"],
    },
    "Half-precision floating point": {
        "add": _half("add.{}", 2),
        "sub": _half("sub.{}", 2),
        "mul": _half("mul.{}", 2),
        "fma": [*_half("fma.rn.{}", 3), "fma.rn.relu.f16x2 " + _R4, "fma.rn.oob.f16x2 " + _R4],
        "neg": _half("neg.{}", 1),
        "abs": _half("abs.{}", 1),
        "min": _half("min.NaN.{}", 2),
        "max": _half("max.{}", 2),
        "tanh": _half("tanh.approx.{}", 1),
        "ex2": ["ex2.approx.f16 %h1, %h2", "ex2.approx.ftz.bf16x2 %r1, %r2"],
    },
    "Mixed-precision floating point": {
        "add": ["add.f32.f16 %r1, %h1, %r2"],
        "sub": ["sub.f32.bf16 %r1, %h1, %r2"],
        "fma": ["fma.rn.f32.f16 %r1, %h1, %h2, %r2"],
    },
    "Comparison and selection": {
        "set": ["set.lt.and.f32.s32 %r1, %r2, %r3, %p1", "set.gtu.u32.f32 " + _R3],
        "setp": [
            "setp.ne.xor.u32 %p1|%p2, %r1, %r2, !%p3",
            "setp.leu.ftz.f32 %p1, %r1, %r2",
            "setp.eq.f64 %p1, %d1, %d2",
        ],
        "selp": ["selp.b64 %d1, %d2, %d3, %p1"],
        "slct": ["slct.f32.s32 " + _R4],
    },
    "Half-precision comparison": {
        "set": ["set.eq.u16.f16 " + _H3, "set.lt.f16x2.f16x2 " + _R3, "set.gt.u32.bf16 %r1, %h1, %h2"],
        "setp": ["setp.lt.bf16 %p1, %h1, %h2", "setp.ge.f16x2 %p1|%p2, %r1, %r2"],
    },
    "Logic and shift": {
        **{name: [f"{name}.b32 {_R3}", f"{name}.pred %p1, %p2, %p3"] for name in ("and", "or", "xor")},
        "not": ["not.b64 %d1, %d2", "not.pred %p1, %p2"],
        "cnot": ["cnot.b32 %r1, %r2"],
        "lop3": ["lop3.b32 %r1, %r2, %r3, %r4, 0x1b", "lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 0x1b, %p2"],
        "shf": ["shf.l.wrap.b32 " + _R4, "shf.r.clamp.b32 " + _R4],
        "shl": ["shl.b64 %d1, %d2, %r1"],
        "shr": ["shr.s16 %h1, %h2, %r1"],
    },
    "Data movement and conversion": {
        "mov": [
            "mov.b32 %r1, {%h1, %h2}",
            "mov.b128 %q1, {%d1, %d2}",
            "mov.u64 %d1, g",
            "mov.u64 %d1, function",
            "mov.u32 %r1, %tid.x",
        ],
        "shfl": ["shfl.bfly.b32 %r1, %r2, 1, 31"],
        "shfl.sync": ["shfl.sync.idx.b32 %r1|%p1, %r2, %r3, 31, -1"],
        "prmt": ["prmt.b32 " + _R4, "prmt.b32.rc8 " + _R4],
        "ld": [
            "ld.global.v4.f32 {%r1, %r2, %r3, %r4}, [%d1]",
            "ld.acquire.gpu.global.u32 %r1, [%d1]",
            "ld.volatile.shared.b8 %h1, [%r1]",
            "ld.shared.b128 %q1, [%r1]",
            "ld.relaxed.cluster.shared::cluster.b32 %r1, [%r2]",
            "ld.global.L2::cache_hint.b64 %d1, [%d2], %d3",
            f"ld.global.v8.b32 {_vector(1, 8)}, [%d1]",
        ],
        "ld.global.nc": ["ld.global.nc.L1::no_allocate.v2.u64 {%d1, %d2}, [%d3]"],
        "ldu": ["ldu.global.b32 %r1, [%d1]"],
        "st": [
            "st.global.v2.b64 [%d1], {%d2, %d3}",
            "st.release.sys.global.b32 [%d1], %r1",
            "st.b16 [%d1], %h1",
            "st.shared::cluster.b32 [%r1], %r2",
        ],
        "st.async": ["st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3]"],
        "st.bulk": ["st.bulk.shared::cta [%d1], %d2, 0"],
        "multimem.ld_reduce": ["multimem.ld_reduce.global.add.f32 %r1, [%d1]"],
        "multimem.st": ["multimem.st.global.b32 [%d1], %r1"],
        "multimem.red": ["multimem.red.global.add.f32 [%d1], %r1"],
        "prefetch": ["prefetch.global.L2 [%d1]", "prefetch.tensormap [%d1]"],
        "prefetchu": ["prefetchu.L1 [%d1]"],
        "applypriority": ["applypriority.global.L2::evict_normal [%d1], 128"],
        "discard": ["discard.global.L2 [%d1], 128"],
        "createpolicy": ["createpolicy.fractional.L2::evict_last.b64 %d1, 1.0"],
        "isspacep": ["isspacep.shared %p1, %d1"],
        "cvta": ["cvta.to.global.u64 %d1, %d2", "cvta.shared.u64 %d1, %d2"],
        "cvt": [
            "cvt.rzi.s32.f32 %r1, %r2",
            "cvt.sat.u8.s32 %r1, %r2",
            "cvt.rm.f64.s64 %d1, %d2",
            "cvt.rp.f32.f64 %r1, %d1",
            "cvt.rn.satfinite.relu.f16x2.f32 " + _R3,
            "cvt.rz.bf16.f32 %h1, %r1",
            "cvt.rna.tf32.f32 %r1, %r2",
            "cvt.rn.satfinite.e4m3x2.f32 %h1, %r1, %r2",
            "cvt.rn.satfinite.e5m2x2.f16x2 %h1, %r1",
            "cvt.rn.relu.f16x2.e4m3x2 %r1, %h1",
            "cvt.rn.satfinite.e2m1x2.f32 %c1, %r1, %r2",
            "cvt.rs.f16x2.f32 " + _R4,
        ],
        "cvt.pack": ["cvt.pack.sat.u16.s32 " + _R3, "cvt.pack.sat.s8.s32.b32 " + _R4],
        "mapa": ["mapa.shared::cluster.u32 " + _R3, "mapa.u64 %d1, %d2, %r1"],
        "getctarank": ["getctarank.shared::cluster.u32 %r1, %r2", "getctarank.u64 %r1, %d1"],
        "cp.async": [
            "cp.async.ca.shared.global [%r1], [%d1], 4, %r2",
            "cp.async.cg.shared.global.L2::128B [%r1], [%d1], 16",
        ],
        "cp.async.commit_group": ["cp.async.commit_group"],
        "cp.async.wait_group": ["cp.async.wait_group 1", "cp.async.wait_all"],
        "cp.async.bulk": [
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d1], %r2, [%r3]",
            "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], %r2",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%r1], [%d1], %r2, [%r3], %h1",
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], %r3, [%r4]",
        ],
        "cp.reduce.async.bulk": [
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1], [%r1], %r2",
            "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 "
            "[%r1], [%r2], %r3, [%r4]",
        ],
        "cp.async.bulk.prefetch": ["cp.async.bulk.prefetch.L2.global [%d1], %r1"],
        "cp.async.bulk.tensor": [
            "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
            "[%r1], [%d1, {%r2, %r3}], [%r4]",
            "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%d1, {%r2, %r3, %r4}], [%r1]",
            "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%r1], [%d1, {%r2}], [%r4], %h1",
            "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
            "[%r1], [%d1, {%r2, %r3, %r4}], [%r5], {%h1}",
        ],
        "cp.reduce.async.bulk.tensor": [
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%d1, {%r2, %r3}], [%r1]"
        ],
        "cp.async.bulk.prefetch.tensor": ["cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {%r2, %r3}]"],
        "cp.async.bulk.commit_group": ["cp.async.bulk.commit_group"],
        "cp.async.bulk.wait_group": ["cp.async.bulk.wait_group 0", "cp.async.bulk.wait_group.read 1"],
        "tensormap.replace": [
            "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %d1",
            "tensormap.replace.tile.box_dim.global.b1024.b32 [%d1], 0, %r1",
        ],
    },
    "Textures": {
        "tex": ["tex.1d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [texture, {%r5}]"],
        "tld4": ["tld4.r.2d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [texture, {%r5, %r6}]"],
        "txq": ["txq.width.b32 %r1, [texture]"],
        "istypep": ["istypep.texref %p1, %d1"],
    },
    "Surfaces": {
        "suld": ["suld.b.1d.b32.trap %r1, [surface, {%r2}]"],
        "sust": ["sust.b.1d.b32.trap [surface, {%r2}], %r1"],
        "sured": ["sured.b.add.1d.u32.trap [surface, {%r2}], %r1"],
        "suq": ["suq.width.b32 %r1, [surface]"],
    },
    "Control flow": {
        "@": ["@%p1 mov.b32 %r1, %r2", "@!%p1 bra END"],
        "bra": ["bra.uni END"],
        "brx.idx": ["brx.idx %r1, TARGETS"],
        "call": ["call function", "call %d1, (), PROTOTYPE"],
        "ret": ["ret"],
        "exit": ["exit"],
    },
    "Parallel synchronisation and communication": {
        "bar, barrier": [
            "bar.sync 0",
            "barrier.cta.arrive 1, 64",
            "bar.red.popc.u32 %r1, 0, %p1",
            "barrier.sync 1, 64",
        ],
        "bar.warp.sync": ["bar.warp.sync %r1"],
        "barrier.cluster": ["barrier.cluster.arrive.release.aligned", "barrier.cluster.wait.acquire.aligned"],
        "membar, fence": [
            "membar.gl",
            "fence.acq_rel.gpu",
            "fence.sc.cluster",
            "fence.proxy.async.shared::cta",
            "fence.mbarrier_init.release.cluster",
            "fence.proxy.tensormap::generic.acquire.gpu [%d1], 128",
            "fence.proxy.alias",
        ],
        "atom": [
            "atom.global.add.f32 %r1, [%d1], %r2",
            "atom.shared.cas.b64 %d1, [%r1], %d2, %d3",
            "atom.acq_rel.sys.global.exch.b128 %q1, [%d1], %q2",
            "atom.global.add.noftz.bf16x2 %r1, [%d1], %r2",
            "atom.global.add.v2.f32 {%r1, %r2}, [%d1], {%r3, %r4}",
            "atom.shared::cluster.add.u32 %r1, [%r2], %r3",
        ],
        "red": ["red.global.add.v4.f32 [%d1], {%r1, %r2, %r3, %r4}", "red.shared.max.s32 [%r1], %r2"],
        "red.async": [
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3]"
        ],
        "vote": ["vote.ballot.b32 %r1, %p1"],
        "vote.sync": ["vote.sync.ballot.b32 %r1, %p1, -1", "vote.sync.uni.pred %p1, %p2, -1"],
        "match.sync": ["match.any.sync.b64 %r1, %d1, -1", "match.all.sync.b32 %r1|%p1, %r2, -1"],
        "activemask": ["activemask.b32 %r1"],
        "redux.sync": ["redux.sync.add.s32 %r1, %r2, -1", "redux.sync.min.f32 %r1, %r2, -1"],
        "griddepcontrol": ["griddepcontrol.wait"],
        "elect.sync": ["elect.sync %r1|%p1, -1"],
        "mbarrier.init": ["mbarrier.init.shared.b64 [%r1], 1"],
        "mbarrier.inval": ["mbarrier.inval.shared.b64 [%r1]"],
        "mbarrier.expect_tx": ["mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], %r2"],
        "mbarrier.complete_tx": ["mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r1], %r2"],
        "mbarrier.arrive": [
            "mbarrier.arrive.shared.b64 %d1, [%r1]",
            "mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1], %r2",
            "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1], %r2",
            "mbarrier.arrive.noComplete.shared.b64 %d1, [%r1], 1",
        ],
        "mbarrier.arrive_drop": ["mbarrier.arrive_drop.shared.b64 %d1, [%r1]"],
        "cp.async.mbarrier.arrive": _each(
            "cp.async.mbarrier.arrive.b64 cp.async.mbarrier.arrive.noinc.shared.b64", "[%r1]"
        ),
        "mbarrier.test_wait, try_wait": [
            "mbarrier.test_wait.shared.b64 %p1, [%r1], %d1",
            "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2, %r3",
        ],
        "mbarrier.pending_count": ["mbarrier.pending_count.b64 %r1, %d1"],
        "tensormap.cp_fenceproxy": [
            "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d1], [%r1], 128"
        ],
        "clusterlaunchcontrol": ["clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q1"],
    },
    "Warp-level matrices": {
        "wmma": [
            f"wmma.load.a.sync.aligned.row.m16n16k16.global.f16 {_vector(1, 8)}, [%d1]",
            f"wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {_vector(1, 8)}, {_vector(9, 8)}, {_vector(17, 8)}, "
            + _vector(1, 8),
            f"wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%r30], {_vector(1, 8)}, %r31",
            "wmma.load.a.sync.aligned.row.m8n8k32.global.s4 {%r1}, [%d1]",
        ],
        "mma": [
            _mma("m16n8k16", "f32.bf16.bf16.f32", (4, 4, 2)),
            _mma("m16n8k16", "f16.f16.f16.f16", (2, 4, 2)),
            _mma("m16n8k8", "f32.tf32.tf32.f32", (4, 4, 2)),
            _mma("m16n8k32", "f32.e4m3.e5m2.f32", (4, 4, 2)),
            _mma("m16n8k32", "s32.s8.u8.s32", (4, 4, 2)),
            _mma("m16n8k64", "s32.s4.s4.s32", (4, 4, 2)),
            _mma("m16n8k256", "s32.b1.b1.s32", (4, 4, 2), ".xor.popc"),
            "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%d1, %d2}, {%d3}, {%d4}, {%d1, %d2}",
            _mma("m8n8k4", "f32.f16.f16.f32", (8, 2, 2)),
            _mma("m16n8k32.kind::mxf8f6f4", "f32.e4m3.e2m1.f32", (4, 4, 2)),
        ],
        "mma.sp": [_mma("m16n8k16", "f32.f16.f16.f32", (4, 2, 2)).replace("mma.", "mma.sp.", 1) + ", %r30, 0"],
        "ldmatrix": [
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r1, %r2, %r3, %r4}, [%r5]",
            "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r1, %r2}, [%r5]",
        ],
        "stmatrix": [
            "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r5], {%r1, %r2}",
            "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r5], {%r1}",
        ],
        "movmatrix": ["movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2"],
    },
    "Asynchronous warpgroup-level matrices": {
        "wgmma.mma_async": [
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 1, 1, 0, 1",
            "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%r1, %r2}, {%r5, %r6, %r7, %r8}, %d2, %p1, 1, 1, 0",
            "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 1, 1",
            "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1, 1, -1",
            "wgmma.mma_async.sync.aligned.m64n8k32.satfinite.s32.s8.u8 {%r1, %r2, %r3, %r4}, %d1, %d2, %p1",
            "wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc {%r1, %r2, %r3, %r4}, %d1, %d2, %p1",
        ],
        "wgmma.mma_async.sp": [
            "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 "
            "{%r1, %r2, %r3, %r4}, %d1, %d2, %r9, 0, %p1, 1, 1, 0, 0"
        ],
        "wgmma.fence": ["wgmma.fence.sync.aligned"],
        "wgmma.commit_group": ["wgmma.commit_group.sync.aligned"],
        "wgmma.wait_group": ["wgmma.wait_group.sync.aligned 1"],
    },
    "Tensor cores of the fifth generation": {
        "tcgen05": [
            "tcgen05.wait::ld.sync.aligned",
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32",
        ],
    },
    "Stack": {
        "stacksave": ["stacksave.u64 %d1"],
        "stackrestore": ["stackrestore.u64 %d1"],
        "alloca": ["alloca.u64 %d1, %d2, 16"],
    },
    "Video": {
        **{name: [f"{name}.s32.s32.s32 {_R3}"] for name in ("vadd", "vsub", "vabsdiff", "vmin", "vmax")},
        "vshl": ["vshl.u32.u32.u32.clamp " + _R3],
        "vshr": ["vshr.u32.u32.u32.wrap " + _R3],
        "vmad": ["vmad.s32.s32.s32 " + _R4],
        "vset": ["vset.s32.s32.lt " + _R3],
        **{
            f"{name}2, {name}4": [f"{name}{width}.s32.s32.s32 {_R4}" for width in (2, 4)]
            for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax")
        },
        "vset2, vset4": ["vset2.s32.s32.lt " + _R4, "vset4.s32.s32.lt " + _R4],
    },
    "Miscellaneous": {
        "brkpt": ["brkpt"],
        "nanosleep": ["nanosleep.u32 %r1"],
        "pmevent": ["pmevent 7"],
        "setmaxnreg": ["setmaxnreg.inc.sync.aligned.u32 64"],
        "trap": ["trap"],
    },
}


@cache
def refused_forms() -> frozenset[str]:
    """The forms that the simulator does not execute, each tried in a kernel of its own."""
    forms = sorted({form for section in FORMS.values() for group in section.values() for form in group})
    kernels = [
        f".visible .entry k{number}() {{ {_DECLARATIONS}\n"
        "TARGETS: .branchtargets END, END; PROTOTYPE: .callprototype _ ();\n"
        f"{form};\nEND: ret; }}"
        for number, form in enumerate(forms)
    ]
    module = SimulatedGPU("sm_90a").load(_HEADER + "\n".join(kernels))
    return frozenset(forms[int(kernel[1:])] for kernel in module.refused)


def _opcode(form: str) -> str:
    words = form.split()
    return words[1] if words[0].startswith("@") else words[0]


def coverage_table() -> str:
    """Section by section: what is executed, what is executed but for some forms, and what is refused."""
    refused = refused_forms()
    rows = []
    for section, instructions in FORMS.items():
        cells: list[list[str]] = [[], [], []]
        for name, forms in instructions.items():
            missing = [form for form in forms if form in refused]
            if not missing:
                cells[0].append(f"`{name}`")
            elif len(missing) == len(forms):
                cells[2].append(f"`{name}`")
            else:
                cells[1].append(f"`{name}` (not {', '.join(f'`{_opcode(form)}`' for form in missing)})")
        rows.append([section, *(", ".join(cell) or "–" for cell in cells)])
    return table(("section of the PTX ISA", "executed", "executed in part", "not executed"), rows, numbers_from=4)
