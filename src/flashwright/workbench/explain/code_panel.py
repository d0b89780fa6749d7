"""Source, PTX and machine code of the loop side by side, and what the page's script needs to join them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import groupby

from flashwright.workbench.explain.facts import ConfigFacts, ListedInstruction, LoopCode, SourceLine, Timeline
from flashwright.workbench.explain.markup import paragraph
from flashwright.workbench.explain.pictures.timeline import BEGIN, END
from flashwright.workbench.quantities import counted

GAP = "⋯"
NONE = "·"


def code_panel(facts: ConfigFacts) -> str:
    """Three listings, each of which scrolls on its own."""
    code = facts.code
    chains = _chains(code)
    machine_code = (
        _listing(code.machine_code, chains, "address", counts=False)
        if code.machine_code
        else paragraph(f"Not available: {facts.loop.sass_problem}.")
    )
    return (
        paragraph(
            f"What the {facts.steps} loop is made of, from line to instruction. A source line counts all that comes "
            "from it, functions that it calls included; a step is that of one warp on the simulated GPU. Point at a "
            "line, or at the timeline, to see what belongs to it in the other listings; click to go there."
        )
        + '<div class="listings">'
        + _column("source", "CUDA source", _source_table(code.lines))
        + _column("ptx", "PTX", _listing(code.ptx, chains, "line", counts=True))
        + _column("sass", "Machine code", machine_code)
        + "</div>"
    )


def code_data(facts: ConfigFacts, timelines: Mapping[str, Timeline]) -> dict[str, object]:
    """Chains of source lines by number, names of lines, and of each timeline's picture the executed PTX lines."""
    return {
        "chains": list(_chains(facts.code)),
        "lines": [f"{line.file}:{line.number}" for line in facts.code.lines],
        "begin": BEGIN,
        "end": END,
        "timelines": {name: timeline.ptx_lines for name, timeline in timelines.items()},
    }


def _chains(code: LoopCode) -> dict[tuple[int, ...], int]:
    """Every sequence of source lines that instructions come from, numbered."""
    return {
        chain: number
        for number, chain in enumerate(dict.fromkeys(each.sources for each in (*code.ptx, *code.machine_code)))
    }


def _column(key: str, title: str, table: str) -> str:
    return (
        f'<div><h3 id="code-{key}">{title}</h3>'
        f'<div class="listing {key}" tabindex="0" role="region" aria-labelledby="code-{key}">{table}</div></div>'
    )


def _source_table(lines: tuple[SourceLine, ...]) -> str:
    rows = []
    for file, of_file in groupby(enumerate(lines), key=lambda item: item[1].file):
        rows.append(f'<tr class="file"><th colspan="4" scope="rowgroup">{escape(file)}</th></tr>')
        last = None
        for index, line in of_file:
            if last is not None and line.number > last + 1:
                rows.append(_gap(4))
            last = line.number
            title = (
                f"{counted(line.ptx, 'PTX instruction')}, {line.executed:,} executed in a step; "
                f"{counted(line.machine_code, 'machine instruction')}"
            )
            text = line.text.lstrip()
            indent = len(line.text) - len(text)
            rows.append(
                f'<tr data-source="{index}" title="{title}">{_count(line.executed)}{_count(line.machine_code)}'
                f'<td class="place">{line.number}</td>'
                f'<td style="--indent:{indent}"><code>{escape(text)}</code></td></tr>'
            )
    return _table(("step", "machine", "line", ""), rows)


def _listing(
    instructions: tuple[ListedInstruction, ...],
    chains: Mapping[tuple[int, ...], int],
    place: str,
    *,
    counts: bool,
) -> str:
    columns = (("step",) if counts else ()) + (place, "")

    def rows() -> Iterator[str]:
        for each in instructions:
            count = _count(each.executed or 0) if counts else ""
            line = f' data-ptx="{each.place}"' if counts else ""
            yield (
                f'<tr data-chain="{chains[each.sources]}"{line}>{count}'
                f'<td class="place">{each.place}</td><td><code>{escape(each.text)}</code></td></tr>'
            )

    return _table(columns, rows())


def _table(columns: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' if name else "<td></td>" for name in columns)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _gap(columns: int) -> str:
    return f'<tr class="gap"><td colspan="{columns}">{GAP}</td></tr>'


def _count(value: int) -> str:
    return f'<td class="number">{value or NONE}</td>'
