"""The parts of a page that are about one instruction: how it reads the banks, and who holds what of its operands."""

from __future__ import annotations

from html import escape

from flashwright.kernels.explanation import CoreMatrices, ExecutedLoads, Product
from flashwright.kernels.family import KernelConfig
from flashwright.workbench.explain.facts import ConfigFacts, MatrixLoad
from flashwright.workbench.explain.markup import figure
from flashwright.workbench.explain.pictures.accumulator import accumulator_picture
from flashwright.workbench.explain.pictures.banks import banks_picture
from flashwright.workbench.explain.pictures.fragments import fragments_picture

# --- Banks -----------------------------------------------------------------------------------------------------


def banks(facts: ConfigFacts, drawn: ExecutedLoads | CoreMatrices | None) -> str:
    """What an instruction reads of a block in shared memory; nothing where that is not drawn."""
    if drawn is None or not facts.matrix_loads:
        return ""
    return _ldmatrix_on_banks(facts) if isinstance(drawn, ExecutedLoads) else _wgmma_on_banks(facts)


def _ldmatrix_on_banks(facts: ConfigFacts) -> str:
    operand = facts.matrix_loads[0].operand
    return f"""
<h3>One <code>ldmatrix</code> on the banks</h3>
<p>Shared memory has 32 banks of 4 bytes; a row of {operand} is moved in vectors of 16 bytes, four banks each. An
<code>ldmatrix.x4</code> loads four 8×8 matrices, one after the other; lanes 0–7 give the addresses of the first one's
rows. Rows that lie in the same banks take turns. The addresses are those of the first <code>ldmatrix</code> of
{operand} that the warp executed.</p>""" + _panels(
        facts.matrix_loads,
        "Colours and numbers name the banks of each vector. Filled circles: lanes 0–7, the first matrix. "
        "Open circles: the other three.",
    )


def _wgmma_on_banks(facts: ConfigFacts) -> str:
    own = facts.matrix_loads[0]
    return f"""
<h3>One <code>wgmma</code> on the banks</h3>
<p>Shared memory has 32 banks of 4 bytes; a row of 64 columns of {own.operand} is eight chunks of 16 bytes, four banks
each. They are swizzled as they are copied: chunk <i>c</i> of row <i>r</i> goes to place <i>c</i> XOR
<i>r</i> mod 8. A <code>{own.instruction.removeprefix("wgmma.mma_async.sync.aligned.")}</code> is 16 columns deep and
finds them by a descriptor, as core matrices of 8 rows by 16 bytes; here {own.source}. The eight rows of a core matrix
lie in all 32 banks; without swizzle they would lie in four.</p>""" + _panels(
        facts.matrix_loads,
        "Colours and numbers name the banks of each chunk. Filled circles: rows 0–7 of the first core matrix. Open "
        "circles: the next three. The addresses come from the descriptor, by the rules of the PTX manual; wavefronts "
        "are what so many rows in the same banks would take one after the other.",
    )


def _panels(loads: tuple[MatrixLoad, ...], caption: str) -> str:
    """A block with and without swizzle, side by side; the first is the config's own."""
    panels = "".join(
        f"<div><h3>{'With' if load.swizzled else 'Without'} swizzle{' (this config)' if load is loads[0] else ''}</h3>"
        f"{banks_picture(load, f'banks-{index}')}</div>"
        for index, load in enumerate(sorted(loads, key=lambda load: load.swizzled))
    )
    return f'<figure><div class="panels">{panels}</div><figcaption>{escape(caption)}</figcaption></figure>'


# --- Products --------------------------------------------------------------------------------------------------


def product_title(drawn: Product | None) -> str:
    return "Who holds what in an mma" if drawn is Product.MMA else "Who holds what in a wgmma"


def product(facts: ConfigFacts, config: KernelConfig, drawn: Product | None) -> str:
    """Who holds what in the instruction that multiplies; nothing where that is not drawn."""
    if drawn is None:
        return ""
    return _mma(facts) if drawn is Product.MMA else _wgmma(config)


def _mma(facts: ConfigFacts) -> str:
    count = sum(n for opcode, n in facts.loop.ptx.by_opcode.items() if opcode.startswith("mma"))
    return (
        f"<p>A step of the loop is {count} <code>mma.m16n8k16</code> per warp. Each multiplies 16 rows of Q with 8 "
        "rows of K, 16 columns deep; later, 16 rows of P with 8 columns of V. No lane holds a whole row: a row of S "
        "is spread over four lanes, which is why softmax needs shuffles between them.</p>"
        + figure(fragments_picture("Q (or P)", "Kᵀ (or V)", "S (or O)"), size="medium")
    )


def _wgmma(config: KernelConfig) -> str:
    columns, d_head = config.B_c, config.d_head
    # By the config: where products may be computed again, the loop's text holds them more than once.
    instructions = f"{d_head // 16} <code>m64n{columns}k16</code> and {columns // 16} <code>m64n{d_head}k16</code>"
    return (
        f"<p>A step of the loop is {instructions} per warpgroup. Each warp holds 16 of the 64 rows, spread over its "
        "lanes as in <code>mma.m16n8k16</code>: a row of S over four lanes, which is why softmax needs shuffles. Two "
        "tiles of 8 columns of S, rounded to 16 bits, are just what a lane must hold of P as the other operand of "
        "O += PV: P never leaves its registers.</p>" + figure(accumulator_picture(columns, "S"), size="medium")
    )
