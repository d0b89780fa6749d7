"""The parts of a page that only the Hopper family has: `wgmma` on the banks, and the fragments of its accumulator."""

from __future__ import annotations

from flashwright.explain.bank_panels import bank_panels
from flashwright.explain.facts import ConfigFacts
from flashwright.explain.markup import figure
from flashwright.explain.pictures.accumulator import accumulator_picture

TIMELINE_INTRODUCTION = (
    "The instructions that the first warp of each consumer warpgroup and the producer really executed, in order, over "
    "two steps in the middle of the loop. A bar above a consumer says which product is under way: framed while it is "
    "being issued and committed, plain until the wait for it. A bar above the producer says which block has a stage: "
    "from the start of its copy until all consumers have read it and the producer finds the stage empty."
)
TIMELINE_CAPTION = (
    "Each mark is a run of consecutive instructions of one kind; the numbers beside the lanes count them. Positions "
    "are counts of a warp's own instructions, not time: pictures of different warps are not on one clock. They are "
    "PTX, in the order the compiler wrote it."
)
NOTHING_TO_HIDE_BEHIND = "no softmax of its own warpgroup to hide behind"
PRODUCT_TITLE = "Who holds what in a wgmma"


def banks(facts: ConfigFacts) -> str:
    own = facts.matrix_loads[0]
    return f"""
<h3>One <code>wgmma</code> on the banks</h3>
<p>Shared memory has 32 banks of 4 bytes; a row of 64 columns of {own.operand} is eight chunks of 16 bytes, four banks
each. The copy engine swizzles them as they arrive: chunk <i>c</i> of row <i>r</i> goes to place <i>c</i> XOR
<i>r</i> mod 8. A <code>{own.instruction.removeprefix("wgmma.mma_async.sync.aligned.")}</code> is 16 columns deep and
finds them by a descriptor, as core matrices of 8 rows by 16 bytes; here {own.source}. The eight rows of a core matrix
lie in all 32 banks; without swizzle they would lie in four.</p>""" + bank_panels(
        facts.matrix_loads,
        "Colours and numbers name the banks of each chunk. Filled circles: rows 0–7 of the first core matrix. Open "
        "circles: the next three. The addresses come from the descriptor, by the rules of the PTX manual; wavefronts "
        "are what so many rows in the same banks would take one after the other.",
    )


def product(facts: ConfigFacts) -> str:
    columns, d_head = (int(next(knob.value for knob in facts.knobs if knob.name == name)) for name in ("B_c", "d_head"))
    # By the config: with guesses, the loop's text holds the scores once more, for those that fail.
    instructions = f"{d_head // 16} <code>m64n{columns}k16</code> and {columns // 16} <code>m64n{d_head}k16</code>"
    return (
        f"<p>A step of the loop is {instructions} per warpgroup. Each warp holds 16 of the 64 rows, spread over its "
        "lanes as in <code>mma.m16n8k16</code>: a row of S over four lanes, which is why softmax needs shuffles. Two "
        "tiles of 8 columns of S, rounded to 16 bits, are just what a lane must hold of P as the other operand of "
        "O += PV: P never leaves its registers.</p>" + figure(accumulator_picture(columns, "S"), size="medium")
    )
