"""The parts of a page that only the Ampere family has: `ldmatrix` on the banks, and the fragments of `mma`."""

from __future__ import annotations

from flashwright.explain.bank_panels import bank_panels
from flashwright.explain.facts import ConfigFacts
from flashwright.explain.markup import figure
from flashwright.explain.pictures.fragments import fragments_picture

TIMELINE_INTRODUCTION = (
    "The instructions that one warp really executed, in order, over two steps in the middle of the loop. "
    "A bar above says which block is on its way: framed while its copy is being started, plain until the wait "
    "that makes it arrive."
)
TIMELINE_CAPTION = (
    "Each mark is a run of consecutive instructions of one kind; the numbers beside the lanes count them. "
    "Positions are counts of instructions, not time. They are PTX, in the order the compiler wrote it; the "
    "assembler keeps that order unless assembler_reorders is on."
)
NOTHING_TO_HIDE_BEHIND = "nothing to hide behind: the warp waits for it at once"
PRODUCT_TITLE = "Who holds what in an mma"


def banks(facts: ConfigFacts) -> str:
    if not facts.matrix_loads:
        return ""
    operand = facts.matrix_loads[0].operand
    return f"""
<h3>One <code>ldmatrix</code> on the banks</h3>
<p>Shared memory has 32 banks of 4 bytes; a row of {operand} is moved in vectors of 16 bytes, four banks each. An
<code>ldmatrix.x4</code> loads four 8×8 matrices, one after the other; lanes 0–7 give the addresses of the first one's
rows. Rows that lie in the same banks take turns. The addresses are those of the first <code>ldmatrix</code> of
{operand} that the warp executed.</p>""" + bank_panels(
        facts.matrix_loads,
        "Colours and numbers name the banks of each vector. Filled circles: lanes 0–7, the first matrix. "
        "Open circles: the other three.",
    )


def product(facts: ConfigFacts) -> str:
    count = sum(n for opcode, n in facts.loop.ptx.by_opcode.items() if opcode.startswith("mma"))
    return (
        f"<p>A step of the loop is {count} <code>mma.m16n8k16</code> per warp. Each multiplies 16 rows of Q with 8 "
        "rows of K, 16 columns deep; later, 16 rows of P with 8 columns of V. No lane holds a whole row: a row of S "
        "is spread over four lanes, which is why softmax needs shuffles between them.</p>"
        + figure(fragments_picture("Q (or P)", "Kᵀ (or V)", "S (or O)"), size="medium")
    )
