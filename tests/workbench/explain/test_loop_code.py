"""Source, PTX and machine code of the loop, joined by source lines."""

from __future__ import annotations

import pytest
from explain_cases import EAGER, HOPPER_OVERLAPPED, explained

from flashwright.workbench.explain import loop_code as module
from flashwright.workbench.explain.disassembly import DisassemblyError, find_disassembler
from flashwright.workbench.explain.explanations import counted_warp
from flashwright.workbench.explain.facts import ListedInstruction, LoopCode

needs_disassembler = pytest.mark.skipif(find_disassembler() is None, reason="no nvdisasm")


def from_line(instructions: tuple[ListedInstruction, ...], line: int) -> list[ListedInstruction]:
    return [each for each in instructions if line in each.sources]


def line_with(code: LoopCode, text: str) -> int:
    (index,) = (index for index, line in enumerate(code.lines) if text in line.text)
    return index


def test_what_is_executed_adds_up_to_the_step():
    facts = explained(EAGER)
    assert facts.simulation is not None
    assert sum(each.executed or 0 for each in facts.code.ptx) == facts.simulation.step.instructions
    assert len(facts.code.ptx) == facts.loop.ptx.total


def test_a_line_of_the_kernel_counts_what_the_functions_it_calls_come_to():
    code = explained(EAGER).code
    product = line_with(code, "// @product S")
    found = from_line(code.ptx, product)
    assert sum(each.text.startswith("mma.sync") for each in found) == 32  # 16 × 64 scores of a warp, 64 deep
    line = code.lines[product]
    assert (line.file, line.ptx, line.executed) == ("forward/ampere.cuh", len(found), len(found))
    assert line.machine_code == len(from_line(code.machine_code, product))


def test_the_innermost_line_is_the_first_and_the_kernels_the_last():
    code = explained(EAGER).code
    for each in code.ptx:
        if each.text.startswith("mma.sync"):
            files = [code.lines[index].file for index in each.sources]
            assert files[0] == "ptx/mma.cuh" and files[-1] == "forward/ampere.cuh"


@needs_disassembler
def test_machine_code_comes_from_the_same_lines_as_the_ptx():
    facts = explained(EAGER)
    code = facts.code
    assert facts.loop.sass is not None and len(code.machine_code) == facts.loop.sass.total
    wrapper = line_with(code, "mma.sync.aligned.m16n8k16.row.col.f32.bf16")
    products = [each for each in code.machine_code if each.text.startswith("HMMA")]
    assert products and products == from_line(code.machine_code, wrapper)
    assert all(each.executed is None for each in products)


@pytest.mark.parametrize("config", [EAGER, HOPPER_OVERLAPPED])
def test_every_executed_instruction_of_a_timeline_is_listed(config):
    facts = explained(config)
    listed = {each.place for each in facts.code.ptx}
    for timeline in facts.timelines:
        assert len(timeline.ptx_lines) == timeline.instructions
        assert {str(line) for line in timeline.ptx_lines} <= listed


def test_every_kind_of_warp_is_listed_with_its_own_step():
    facts = explained(HOPPER_OVERLAPPED)
    executed = {int(each.place): each.executed for each in facts.code.ptx}
    consumer, producer = facts.timelines[0], facts.timelines[-1]
    for timeline in (consumer, producer):
        step = timeline.ptx_lines[: timeline.step_starts[1]]
        assert all(step.count(line) == executed[line] for line in step)


def test_without_a_disassembler_there_is_no_machine_code(monkeypatch, compiled):
    def missing(*_: object, **__: object) -> str:
        raise DisassemblyError("none")

    monkeypatch.setattr(module, "disassemble", missing)
    kernel = compiled(EAGER)
    code = module.loop_code(kernel, {counted_warp(kernel.config): None})
    assert code.machine_code == () and code.ptx and all(line.machine_code == 0 for line in code.lines)
