"""Every knob reaches the generated code: the PTX of real kernels, as counts and as the order of its instructions."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby, pairwise
from typing import NamedTuple

import pytest

from flashwright import DType, FlashForwardKernelConfig, ForwardKernelTileShapes, Kernel, compile_kernel
from flashwright.kernels.source import device_headers
from flashwright.simulator.ptx.parser import parse
from flashwright.simulator.ptx.syntax import Instruction, SourceLocation

BASE = "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"
SHAPES = [
    BASE,
    "(FP16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax",
    "(BF16, 64, 128, 64, 4): async+eager+swizzled+load_4_4_2_tiles+opt_softmax",
    "(FP16, 128, 128, 32, 8): async+eager+swizzled+load_2_2_0_tiles+opt_softmax",
]

# --- Reading PTX ---------------------------------------------------------------------------------------------


def body(kernel: Kernel) -> list[str]:
    """The kernel's instructions, one per line, under a name that does not tell the config."""
    text = kernel.ptx[kernel.ptx.index(".entry") :].replace(kernel.name, "kernel")
    end = re.search(r"\bret;\s*\n}", text)  # inline assembly has braces too
    assert end is not None
    text = text[text.index("\n{") : end.end()]
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if re.match(r"(@!?%p\d+ )?[a-z]\S*.*;$", line)]


def opcodes(kernel: Kernel) -> list[str]:
    return [re.sub(r"^@!?%p\d+ ", "", line).split(" ")[0].rstrip(";") for line in body(kernel)]


def count(kernel: Kernel, *prefixes: str) -> int:
    return sum(opcode.startswith(prefixes) for opcode in opcodes(kernel))


def machine_code(kernel: Kernel) -> bytes:
    """The instructions in the cubin: its section `.text.<name>` (ELF64, little-endian)."""
    elf = kernel.cubin
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<3H", elf, 0x3A)
    # (name, type, flags, address, offset, size) of each section
    sections = [struct.unpack_from("<2I4Q", elf, table + entry_bytes * i) for i in range(count)]
    names = elf[sections[names_index][4] :]
    wanted = f".text.{kernel.name}".encode() + b"\0"
    offset, size = next(s[4:6] for s in sections if names[s[0] :].startswith(wanted))
    return elf[offset : offset + size]


EVENTS = {
    "cp.async.cg": "copy",
    "ld.global.v4": "copy",
    "cp.async.wait_group": "wait",
    "bar.sync": "barrier",
    "ldmatrix.sync.aligned.m8n8.x4.shared": "load",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared": "load transposed",
    "mma.sync": "mma",
    "ex2": "exp2",
    "st.global": "store",
}


def runs(events: list[str]) -> list[tuple[str, int]]:
    """Consecutive equal events as (event, how many)."""
    return [(event, len(list(group))) for event, group in groupby(events)]


def events(kernel: Kernel) -> list[str]:
    found = (next((name for prefix, name in EVENTS.items() if op.startswith(prefix)), None) for op in opcodes(kernel))
    return [event for event in found if event]


# --- What a config promises ----------------------------------------------------------------------------------


class Step(NamedTuple):
    """A copy of the code of a KV step."""

    complete: bool
    """Of the main loop, whose blocks are complete; the others compute or copy the incomplete last block."""
    first: bool = False


class Expected:
    """The events of a kernel in order, as its config and tile shapes promise them.

    The code of a step is there twice: in the main loop, and for the steps around an incomplete last block, which come
    behind it, or before it where that block is visited first. A peeled first step is such a step too.
    """

    def __init__(self, config: FlashForwardKernelConfig) -> None:
        self.config = config
        self.shapes = shapes = ForwardKernelTileShapes(config)
        self.row_tiles = shapes.QO_rows_per_warp // 16
        self.Q_copies = config.B_r * config.d_head // 8 // shapes.threads
        self.KV_copies = config.B_c * config.d_head // 8 // shapes.threads
        self.O_stores = shapes.QO_rows_per_warp * config.d_head // 8 // 32
        self.Q_loads = self.row_tiles * config.d_head // 16
        self.K_loads = config.B_c // 16 * config.d_head // 16
        self.V_loads = self.K_loads
        self.QK_mmas = self.row_tiles * config.B_c // 8 * config.d_head // 16
        self.PV_mmas = self.row_tiles * config.d_head // 8 * config.B_c // 16
        self.row_sum_mmas = self.row_tiles * config.B_c // 16 if config.mma_row_sum else 0
        main, other = Step(complete=True), Step(complete=False)
        peeled = [Step(complete=False, first=True)] if config.peeled_first_step else []
        if config.reversed_kv:
            self.steps = [*(peeled or [other]), main]
        else:
            self.steps = [*peeled, main, other]

    def events(self) -> list[str]:
        Q_whole = [*self._wait(), *["load"] * self.Q_loads] if self.config.Q_mma_load_K_tiles == 0 else []
        first_copies = [self.Q_copies, *[self.KV_copies] * (2 if self.config.two_kv_stages else 1)]
        return [
            *(event for many in first_copies for event in self._copy(many, complete=False)),
            *Q_whole,
            *(event for step in self.steps for event in self._step(step)),
            *["store"] * self.O_stores,
        ]

    @staticmethod
    def _copy(many: int, *, complete: bool) -> list[str]:
        """Of a complete block, all of them one after the other; and, of one that may be incomplete, in a loop."""
        return ["copy"] * (many if complete else many + 1)

    def _step(self, step: Step) -> list[str]:
        copy = self._copy(self.KV_copies, complete=step.complete)
        eager, lazy = (copy, []) if self.config.eager_load_blocks else ([], copy)
        # One exponential per score; and one per row, to rescale what earlier steps left.
        exponentials = self.shapes.S_accumulator_registers + (0 if step.first else 2 * self.row_tiles)
        Q_streamed = self.Q_loads if self.config.Q_mma_load_K_tiles else 0
        QK, PV = self.shapes.QK, self.shapes.PV
        if self.config.two_kv_stages:  # K and V of the next step at once, behind the only barrier
            before_S, before_softmax = [*copy, *copy], []
        else:
            before_S, before_softmax = eager, [*lazy, *self._wait(), *eager]
        return [
            *self._wait(),
            *before_S,
            *self._gemm("load", QK, Q_streamed, self.K_loads, self.QK_mmas),
            *before_softmax,
            *["exp2"] * exponentials,
            *["mma"] * self.row_sum_mmas,
            *self._gemm("load transposed", PV, 0, self.V_loads, self.PV_mmas),
            *lazy,
        ]

    def _wait(self) -> list[str]:
        return ["wait", "barrier"] if self.config.async_copy else ["barrier"]

    @staticmethod
    def _gemm(load: str, gemm, A_loads: int, B_loads: int, mmas: int) -> list[str]:
        tiles = gemm.tiles
        whole_B = [load] * B_loads if gemm.B_load_entire_block_into_rf else []
        streamed = A_loads + (0 if gemm.B_load_entire_block_into_rf else B_loads)
        load_tile, multiply_tile = [load] * (streamed // tiles), ["mma"] * (mmas // tiles)
        if gemm.DoubleBuffer:
            steady = [event for _ in range(tiles - 1) for event in load_tile + multiply_tile]
            return whole_B + load_tile + steady + multiply_tile
        return whole_B + (load_tile + multiply_tile) * tiles


@pytest.mark.parametrize(
    "short_form",
    [
        *SHAPES,
        "(BF16, 128, 64, 64, 4): load_0_0_0_tiles",
        "(BF16, 128, 64, 64, 4): async+load_0_0_0_tiles",
        "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax",
        "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_4_0_tiles+opt_softmax",
        "(BF16, 64, 64, 64, 4): async+eager+swizzled+load_2_0_4_tiles+opt_softmax",
        "(FP16, 64, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax",
        "(FP16, 64, 128, 128, 8): async+eager+swizzled+load_4_4_0_tiles+buffer+opt_softmax",
        "(FP16, 64, 64, 32, 4): swizzled+load_2_2_2_tiles+buffer+opt_softmax+peeled",
        "(BF16, 64, 128, 64, 8): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+peeled+reversed+streaming+mma_sum",
        "(BF16, 64, 128, 64, 4): async+eager+swizzled+load_2_2_0_tiles+buffer+opt_softmax+mma_sum+two_stages",
        "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax+two_stages",
    ],
)
def test_copies_waits_loads_and_products_come_in_the_number_and_order_the_config_promises(compiled, short_form):
    kernel = compiled(short_form)
    assert runs(events(kernel)) == runs(Expected(kernel.config).events())


def sources(kernel: Kernel) -> list[str]:
    """Of every instruction, the line that it comes from and those that this was inlined at."""
    headers = {name: text.splitlines() for name, text in device_headers()}

    def lines(place: SourceLocation | None) -> Iterator[str]:
        while place is not None:
            if place.file in headers:
                yield f"{place.file}: {headers[place.file][place.line - 1]}"
            place = place.inlined_at

    (function,) = (function for function in parse(kernel.ptx).functions.values() if function.is_entry)
    return ["\n".join(lines(item.source)) for item in function.body if isinstance(item, Instruction)]


@pytest.mark.parametrize("changes", [{}, {"reversed_kv": True}, {"two_kv_stages": True, "peeled_first_step": True}])
def test_the_main_loop_has_neither_masks_nor_copies_of_incomplete_blocks(compiled, changes):
    found = sources(compiled(BASE, **changes))
    main = [lines for lines in found if "kv_step<false, has_mask, true>" in lines]
    others = [lines for lines in found if "kv_step<false, true, false>" in lines]
    for text in ("mask(S, first_query, first_key);", "start_incomplete<rows>("):
        assert not any(text in lines for lines in main)
        assert any(text in lines for lines in others)
    assert 0 < len(main) < len(others)


# --- Every knob ----------------------------------------------------------------------------------------------

CHANGES = {
    "dtype": DType.FP16,
    "d_head": 64,
    "B_r": 128,
    "B_c": 32,
    "n_warps": 2,
    "async_copy": False,
    "eager_load_blocks": False,
    "swizzled": False,
    "Q_mma_load_K_tiles": 0,
    "K_mma_load_K_tiles": 4,
    "V_mma_load_K_tiles": 4,
    "mma_double_buffer_loads": True,
    "optimized_softmax": False,
    "peeled_first_step": True,
    "reversed_kv": True,
    "streaming_stores": True,
    "static_row_stride": 128,
    "mma_row_sum": True,
    "two_kv_stages": True,
    "lazy_rescale": True,
    "keep_order": True,
    "ring_stages": 2,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_knob_changes_the_instructions(compiled, field):
    assert body(compiled(BASE)) != body(compiled(BASE, **{field: CHANGES[field]}))


def test_the_assemblers_freedom_changes_the_machine_code_and_not_the_ptx(compiled, empty_cache):
    kept, reordered = compiled(BASE), compiled(BASE, assembler_reorders=True)
    assert body(kept) == body(reordered)
    assert machine_code(kept) != machine_code(reordered)
    again = compile_kernel(kept.config, "sm_80", cache=empty_cache)
    assert machine_code(kept) == machine_code(again), "compiling twice must not look like a difference"


def test_no_knob_is_left_without_a_test():
    assert {field.name for field in fields(FlashForwardKernelConfig)} == {*CHANGES, "assembler_reorders"}


def test_a_ring_has_no_barrier_of_the_thread_block_in_its_loop(compiled):
    ring = compiled(BASE, ring_stages=3)
    assert count(ring, "bar.sync", "barrier") == 1, "the one after the ring's barriers are initialised"
    bodies, copied_before = 2, 1
    assert count(ring, "mbarrier.test_wait") == bodies * 2 + copied_before
    assert count(ring, "cp.async.mbarrier.arrive.noinc") == bodies + copied_before


@pytest.mark.parametrize("short_form", SHAPES)
def test_asynchronous_copies_are_cp_async_and_the_others_go_through_registers(compiled, short_form):
    asynchronous = compiled(short_form)
    synchronous = compiled(short_form, async_copy=False, eager_load_blocks=False)
    expected = Expected(asynchronous.config)
    # Q and the first K; in the main loop V and the next K; in the steps apart again. All but those of the main loop may
    # be of incomplete blocks.
    copies = expected.Q_copies + expected.KV_copies + 2 * expected.KV_copies + 2 * expected.KV_copies + 4
    assert count(asynchronous, "cp.async.cg.shared.global") == copies
    assert count(asynchronous, "cp.async.commit_group") == 6
    assert count(asynchronous, "ld.global", "st.shared.v4") == 0
    assert count(synchronous, "cp.async") == 0
    assert count(synchronous, "ld.global.v4") == count(synchronous, "st.shared.v4") == copies


def test_eager_loads_start_before_the_product_that_hides_them(compiled):
    def order(kernel: Kernel) -> list[str]:
        return [event for event, _ in runs(events(kernel)) if event in ("copy", "mma")]

    loads_run_into_mmas = {"Q_mma_load_K_tiles": 0, "K_mma_load_K_tiles": 0, "V_mma_load_K_tiles": 0}
    eager = compiled(BASE, **loads_run_into_mmas)
    lazy = compiled(BASE, eager_load_blocks=False, **loads_run_into_mmas)
    #                       Q and K  V       QK     next K  PV, of both steps
    assert order(eager) == ["copy", *2 * ["copy", "mma", "copy", "mma"]]
    #                      Q and K  QK     V       PV     next K, of both steps
    assert order(lazy) == ["copy", *2 * ["mma", "copy", "mma", "copy"]]


@pytest.mark.parametrize("short_form", SHAPES)
def test_addresses_are_xored_exactly_when_swizzled(compiled, short_form):
    assert count(compiled(short_form), "xor.b32") > 0
    assert count(compiled(short_form, swizzled=False), "xor.b32") == 0


@pytest.mark.parametrize(
    ("Q", "K", "V", "buffer", "loads_before_first_QK_mma", "loads_before_first_PV_mma"),
    [
        # A tile of 2 fragments is one 16-wide step: 1 ldmatrix of Q, 4 of K; 8 of V.
        (2, 2, 2, False, 1 + 4, 8),
        (2, 2, 2, True, 2 * (1 + 4), 2 * 8),
        (4, 4, 4, False, 2 + 8, 16),
        (4, 4, 4, True, 2 * (2 + 8), 2 * 16),
        (0, 2, 2, False, 4, 8),
        (0, 2, 0, True, 2 * 4, 32),
        (0, 0, 0, False, 32, 32),
        (2, 0, 2, False, 32 + 1, 8),
    ],
)
def test_load_tiles_and_buffers_set_how_much_is_loaded_before_the_first_product(
    compiled, Q, K, V, buffer, loads_before_first_QK_mma, loads_before_first_PV_mma
):
    kernel = compiled(
        BASE, Q_mma_load_K_tiles=Q, K_mma_load_K_tiles=K, V_mma_load_K_tiles=V, mma_double_buffer_loads=buffer
    )
    sequence = runs([event for event in events(kernel) if event in ("barrier", "load", "load transposed", "mma")])
    # A Q that is held as a whole has been loaded behind a barrier of its own, before the loop.
    loop = sequence[sequence.index(("barrier", 1)) + (2 if Q == 0 else 0) :]
    first_load = next(many for event, many in loop if event == "load")
    first_transposed = next(many for event, many in loop if event == "load transposed")
    assert (first_load, first_transposed) == (loads_before_first_QK_mma, loads_before_first_PV_mma)


def test_a_q_held_in_registers_is_loaded_once_before_the_loop(compiled):
    def loads_in_loops(kernel: Kernel) -> list[int]:
        """From a loop's first label to the branch back to it, for loops with products."""
        text = kernel.ptx
        branches = re.finditer(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", text)
        loops = [text[text.index(f"{b[1]}:") : b.start()] for b in branches]
        return [
            len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared", loop)) for loop in loops if "mma.sync" in loop
        ]

    # Without a peeled step the compiler may turn the loop around; with one, it is a plain do-while.
    streamed = compiled(BASE, peeled_first_step=True)
    held = compiled(BASE, peeled_first_step=True, Q_mma_load_K_tiles=0)
    expected = Expected(streamed.config)
    assert loads_in_loops(streamed) == 2 * [expected.Q_loads + expected.K_loads]
    assert loads_in_loops(held) == 2 * [expected.K_loads]


@pytest.mark.parametrize("short_form", SHAPES)
def test_products_and_fragment_loads_are_as_many_as_the_shapes_say(compiled, short_form):
    kernel = compiled(short_form)
    expected, steps = Expected(kernel.config), 2
    assert count(kernel, "mma.sync") == steps * (expected.QK_mmas + expected.PV_mmas)
    assert count(kernel, "ldmatrix") == steps * (expected.Q_loads + expected.K_loads + expected.V_loads)
    assert count(kernel, "ldmatrix.sync.aligned.m8n8.x4.trans") == steps * expected.V_loads


@pytest.mark.parametrize(
    ("changes", "barriers"),
    [
        ({}, 2 * 2),
        ({"Q_mma_load_K_tiles": 0}, 2 * 2 + 1),
        ({"peeled_first_step": True}, 3 * 2),
        ({"async_copy": False}, 2 * 2),
        ({"two_kv_stages": True}, 2 * 1),
    ],
)
def test_a_step_has_two_barriers_or_one_with_two_stages_and_a_whole_q_one_more(compiled, changes, barriers):
    if not changes.get("async_copy", True):
        changes = changes | {"eager_load_blocks": False}
    assert count(compiled(BASE, **changes), "bar.sync") == barriers


@pytest.mark.parametrize("short_form", SHAPES)
def test_the_optimised_softmax_takes_fewer_fp32_instructions_for_the_same_exponentials(compiled, short_form):
    arithmetic = ("add.f32", "sub.f32", "mul.f32", "fma.", "cvt.sat.f32", "ex2")
    optimised, plain = compiled(short_form), compiled(short_form, optimized_softmax=False)
    scores, steps = ForwardKernelTileShapes(optimised.config).S_accumulator_registers, 2
    exponentials = steps * (scores + 2 * Expected(optimised.config).row_tiles)
    assert count(optimised, "ex2") == count(plain, "ex2") == exponentials
    assert count(plain, *arithmetic) - count(optimised, *arithmetic) >= steps * 4 * scores


def test_a_peeled_first_step_is_a_third_body_and_rescales_nothing_the_first_time(compiled):
    looped, peeled = compiled(BASE), compiled(BASE, peeled_first_step=True)
    for opcode in ("mma.sync", "ldmatrix", "bar.sync", "cp.async.wait_group"):
        assert 2 * count(peeled, opcode) == 3 * count(looped, opcode)
    shapes = ForwardKernelTileShapes(looped.config)
    assert count(peeled, "ex2") - count(looped, "ex2") == shapes.S_accumulator_registers
    added_products = count(peeled, "mul.f32") - count(looped, "mul.f32")
    assert added_products < shapes.S_accumulator_registers + shapes.O_accumulator_registers


def test_lazy_rescaling_puts_the_products_with_O_behind_a_vote(compiled):
    always, lazy = compiled(BASE), compiled(BASE, lazy_rescale=True)
    assert count(always, "vote") == 0 and count(lazy, "vote.sync.any") == 2
    rescaling = ForwardKernelTileShapes(lazy.config).O_accumulator_registers
    ops = opcodes(lazy)
    skipped = ops[ops.index("vote.sync.any.pred") :]
    skipped = skipped[skipped.index("bra") if "bra" in skipped else 0 :][: 2 * rescaling + 16]
    assert sum(op == "mul.f32" for op in skipped) >= rescaling


@pytest.mark.parametrize(
    "changes", [{}, {"mma_double_buffer_loads": True}, {"Q_mma_load_K_tiles": 0, "K_mma_load_K_tiles": 0}]
)
def test_keeping_the_order_fences_every_change_between_loads_and_products(compiled, changes):
    """And adds nothing else."""
    free, kept = compiled(BASE, **changes), compiled(BASE, keep_order=True, **changes)
    assert count(free, "pmevent") == 0
    assert runs(events(kept)) == runs(events(free))
    found = [("fence" if op.startswith("pmevent") else "load" if op.startswith("ldmatrix") else "mma")
             for op in opcodes(kept) if op.startswith(("pmevent", "ldmatrix", "mma"))]  # fmt: skip
    assert not {("load", "mma"), ("mma", "load")} & set(pairwise(found))


def test_reversing_the_kv_order_does_the_same_work_from_other_addresses(compiled):
    forward, backward = compiled(BASE), compiled(BASE, reversed_kv=True)
    assert Counter(events(forward)) == Counter(events(backward))
    assert body(forward) != body(backward)

    def instructions_before_first_barrier(kernel: Kernel) -> Counter[str]:
        return Counter(opcodes(kernel)[: opcodes(kernel).index("bar.sync")])

    # The first K block is the last: its address needs the number of blocks.
    before = [instructions_before_first_barrier(kernel) for kernel in (forward, backward)]
    assert before[0] != before[1]


@pytest.mark.parametrize("short_form", SHAPES)
def test_streaming_stores_mark_every_store_of_o(compiled, short_form):
    plain, streaming = compiled(short_form), compiled(short_form, streaming_stores=True)
    stores = Expected(plain.config).O_stores
    assert (count(plain, "st.global.v4"), count(plain, "st.global.cs")) == (stores, 0)
    assert (count(streaming, "st.global.v4"), count(streaming, "st.global.cs.v4")) == (0, stores)


def test_a_static_row_stride_is_not_read_and_not_multiplied_by(compiled):
    dynamic, static = compiled(BASE), compiled(BASE, static_row_stride=128)
    # Of Q, K, V and O.
    assert count(dynamic, "ld.param.u64") - count(static, "ld.param.u64") == 4
    assert count(static, "mul.lo.s64") < count(dynamic, "mul.lo.s64")


@pytest.mark.parametrize("short_form", SHAPES)
def test_row_sums_on_the_tensor_cores_replace_additions_and_shuffles_by_products(compiled, short_form):
    added, multiplied = compiled(short_form), compiled(short_form, mma_row_sum=True)
    expected = Expected(multiplied.config)
    scores = expected.shapes.S_accumulator_registers
    assert count(multiplied, "mma.sync") - count(added, "mma.sync") == 2 * expected.row_sum_mmas > 0
    assert count(added, "add.f32", "fma.rn.f32") - count(multiplied, "add.f32", "fma.rn.f32") >= 2 * scores
    # The final sum over the four lanes of a row: two shuffles for each of a thread's rows.
    assert count(added, "shfl") - count(multiplied, "shfl") == 2 * 2 * expected.row_tiles


@pytest.mark.parametrize(("dtype", "there", "not_there"), [("BF16", "bf16", "f16"), ("FP16", "f16", "bf16")])
def test_the_element_type_is_that_of_the_products_and_of_the_rounding(compiled, dtype, there, not_there):
    kernel = compiled(BASE, dtype=dtype)
    products = 2 * (Expected(kernel.config).QK_mmas + Expected(kernel.config).PV_mmas)
    assert count(kernel, f"mma.sync.aligned.m16n8k16.row.col.f32.{there}.{there}.f32") == products
    assert count(kernel, f"cvt.rn.{there}x2.f32") > 0
    assert [op for op in opcodes(kernel) if f".{not_there}." in op or f".{not_there}x2" in op] == []


@pytest.mark.parametrize("short_form", SHAPES)
def test_the_log_sum_exp_is_computed_only_when_requested(compiled, short_form):
    without, with_lse = compiled(short_form), compiled(short_form, returns_lse=True)
    rows_per_thread = 2 * Expected(without.config).row_tiles
    assert (count(without, "lg2"), count(without, "st.global.f32")) == (0, 0)
    assert (count(with_lse, "lg2"), count(with_lse, "st.global.f32")) == (rows_per_thread, rows_per_thread)
