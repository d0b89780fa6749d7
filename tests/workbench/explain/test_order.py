"""The order of loads and products: read from listings, and compared with what configs promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from explain_cases import EAGER, HOPPER_PLAIN, explained

from flashwright import FlashForwardKernelConfig, ForwardKernelTileShapes, compile_kernel
from flashwright.kernels.forward.ampere.explain import buffering
from flashwright.kernels.forward.ampere.ladder import get_kernel_progression
from flashwright.workbench.explain import code_orders as code_orders_module
from flashwright.workbench.explain import disassembly
from flashwright.workbench.explain.code_orders import machine_code_order
from flashwright.workbench.explain.instruction_kinds import Kind, kind_of_sass
from flashwright.workbench.explain.loop import innermost_loop, ptx_loop, sass_listing
from flashwright.workbench.explain.order import CodeOrder, FirstUse, LoadOrder, ptx_order, runs_text, sass_order
from flashwright.workbench.explain.page import config_page
from flashwright.workbench.explain.report import sections

RUNGS = get_kernel_progression(d_head=64)

needs_disassembler = pytest.mark.skipif(disassembly.find_disassembler() is None, reason=disassembly.NOT_FOUND)

# R4…R7 are multiplied after one product and an addition; R20, R21 after a move; R12…R15 in the next iteration.
SASS = """
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   LDSM.16.M88.2 R20, [R2+0x100] ;
        /*0030*/                   HMMA.16816.F32.BF16 R8, R12, R16, R8 ;
        /*0040*/                   FADD R30, R30, R31 ;
        /*0050*/                   HMMA.16816.F32.BF16 R8, R4.reuse, R18, R8 ;
        /*0060*/                   IMAD.MOV.U32 R40, RZ, RZ, R20 ;
        /*0070*/                   LDSM.16.M88.4 R12, [R2+0x200] ;
        /*0080*/                   HMMA.16816.F32.BF16 R8, R24, R40, R8 ;
        /*0090*/              @!P0 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
"""


def order_of(text: str) -> LoadOrder:
    found = sass_order(innermost_loop(sass_listing(text), kind_of_sass, (Kind.MMA,)))
    assert found is not None
    return found


def test_runs_are_loads_and_products_without_what_stands_between_them():
    order = order_of(SASS)
    assert [(run.is_load, run.count) for run in order.runs] == [(True, 2), (False, 2), (True, 1), (False, 1)]
    assert order.instructions == 9


def test_a_first_use_is_followed_through_moves_and_into_the_next_iteration():
    assert order_of(SASS).first_uses == (FirstUse(4, 1), FirstUse(6, 2), FirstUse(5, 1))


def test_pairs_that_repeat_are_written_once():
    lines = ["LDSM.16.M88.4 R4, [R2]", "HMMA.16816.F32 R8, R4, R6, R8"] * 3 + ["LDSM.16.M88.4 R4, [R2]"] * 2
    lines += ["HMMA.16816.F32 R8, R4, R6, R8", "@P0 BRA `(.L_x_1)"]
    order = order_of(".L_x_1:\n" + "".join(f"        /*{n:04x}*/  {line} ;\n" for n, line in enumerate(lines)))
    assert runs_text(CodeOrder("sm_80", True, order)) == "3 × (1 LDSM, 1 HMMA), 2 LDSM, 1 HMMA"
    assert runs_text(CodeOrder("PTX", False, order), most=1) == "3 × (1 ldmatrix, 1 mma), …"


# --- What the ladder's configs promise, and what becomes of it -------------------------------------------------


def promised_runs(config: FlashForwardKernelConfig) -> list[int]:
    """Loads, products, loads, … of a KV step, by arithmetic on the config."""
    shapes = ForwardKernelTileShapes(config)
    row_tiles, QK, PV = shapes.QO_rows_per_warp // 16, shapes.QK, shapes.PV
    K_loads = V_loads = config.B_c // 16 * config.d_head // 16
    Q_loads = 0 if QK.A_load_entire_block_into_rf else row_tiles * config.d_head // 16
    products = row_tiles * config.B_c // 8 * config.d_head // 16
    of_S = _runs_of(QK.tiles, (Q_loads + K_loads) // QK.tiles, products // QK.tiles, QK.DoubleBuffer)
    of_O = _runs_of(PV.tiles, V_loads // PV.tiles, products // PV.tiles, PV.DoubleBuffer)
    of_S[-1] += row_tiles * config.B_c // 16 if config.mma_row_sum else 0
    return of_S + of_O


def _runs_of(tiles: int, loads: int, products: int, double_buffered: bool) -> list[int]:
    if not double_buffered:
        return [loads, products] * tiles
    steady = [loads, products] * (tiles - 2)
    return [2 * loads, products, *steady[:-1], 2 * products] if steady else [2 * loads, 2 * products]


def counts(order: LoadOrder | None) -> list[int]:
    assert order is not None and order.runs[0].is_load
    return [run.count for run in order.runs]


@needs_disassembler
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.change)
def test_a_rungs_ptx_has_the_promised_order_and_its_machine_code_another_as_its_explanation_says(rung, arch):
    config, promised = rung.config, promised_runs(rung.config)
    kernel = compile_kernel(config, arch)
    assert counts(ptx_order(ptx_loop(kernel.ptx, kernel.name))) == promised
    order = counts(machine_code_order(kernel))
    assert sum(order) == sum(promised) and order != promised
    streamed = [each.reason for each in buffering(config) if "tiles is" in each.reason or "buffers" in each.reason]
    assert all("the assembler orders them its own way" in reason for reason in streamed)


@needs_disassembler
@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.change)
def test_a_rung_that_keeps_the_order_has_it_in_machine_code(rung, arch):
    kernel = compile_kernel(replace(rung.config, keep_order=True), arch)
    in_machine_code, in_ptx = machine_code_order(kernel), ptx_order(ptx_loop(kernel.ptx, kernel.name))
    assert counts(in_machine_code) == counts(in_ptx) == promised_runs(rung.config)


# --- In the explanation ----------------------------------------------------------------------------------------


@needs_disassembler
def test_the_explanation_sets_machine_code_of_both_architectures_beside_the_ptx():
    facts = explained(EAGER, turning=("assembler_reorders",))
    assert [found.code for found in facts.orders] == [
        "PTX",
        "sm_80",
        "sm_80, assembler_reorders on",
        "sm_90",
        "sm_90, assembler_reorders on",
    ]
    (table,) = (section for section in sections(facts) if section.key == "order")
    assert "The assembler orders loads and products its own way" in table.remark
    assert table.rows[0].value == len(facts.orders[0].order.runs)
    assert "Load to first use:" in table.rows[1].note
    page = config_page(facts)
    assert 'class="picture order"' in page
    assert "executed on the simulated GPU" in page
    assert facts.to_dict()["orders"][0]["order"]["runs"][0] == {
        "is_load": True,
        "count": facts.orders[0].order.runs[0].count,
    }


def test_without_a_disassembler_the_order_is_that_of_the_ptx_alone(monkeypatch):
    def missing(cubin: bytes) -> str:
        raise disassembly.DisassemblyError(disassembly.NOT_FOUND)

    monkeypatch.setattr(code_orders_module, "disassemble", missing)
    orders = code_orders_module.code_orders(compile_kernel(EAGER), ("sm_80", "sm_90"))
    assert [found.code for found in orders] == ["PTX"]


def test_a_kernel_without_fragment_loads_has_no_such_order():
    facts = explained(HOPPER_PLAIN)
    assert facts.orders == ()
    assert 'class="picture order"' not in config_page(facts)
