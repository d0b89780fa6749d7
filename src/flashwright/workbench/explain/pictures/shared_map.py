"""Shared memory of a thread block, from the first byte to the last."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

from flashwright.kernels.explanation import SharedMap, SharedRegion
from flashwright.workbench.explain.pictures.regions import region_class
from flashwright.workbench.explain.pictures.svg import line, picture, rect, text
from flashwright.workbench.quantities import kib

WIDTH, LEFT, RIGHT = 1160, 2, 2
TOP, BAR = 26, 56
NARROWEST_NAMED = 60
OFFSET_WIDTH = 54
"""Of `0x38000`."""
NAME_LINE, LABEL_LINE = 15, 16
NAME_LETTER, LABEL_LETTER = 7.8, 6.9
"""Widths of letters, by estimate: names that are longer than their place are broken, labels stand above each other."""
NAME_GAP = 6
"""Between names of neighbours."""
LABEL_GAP = 14
"""Between labels of one row."""


def shared_map_picture(shared: SharedMap) -> str:
    scale = (WIDTH - LEFT - RIGHT) / shared.total_bytes
    is_narrow = [region.bytes * scale < NARROWEST_NAMED for region in shared.regions]
    named = {
        region: _broken(region.name, region.bytes * scale)
        for region, narrow in zip(shared.regions, is_narrow, strict=True)
        if not narrow
    }
    rows = _in_rows(_labels(shared.regions, is_narrow, scale))
    top = TOP + LABEL_LINE * max(0, len(rows) - 1)
    bar = BAR + NAME_LINE * (max(map(len, named.values()), default=1) - 1)
    parts = []
    for region in shared.regions:
        x, width = LEFT + region.offset * scale, region.bytes * scale
        tooltip = f"{region.name}: {region.bytes} bytes"
        parts.append(rect(x, top, max(width - 2, 2), bar, f"region {region_class(region.operand)}", tooltip))
        if region in named:
            middle, names = x + width / 2, named[region]
            size_y = top + 28 + NAME_LINE * len(names)
            parts += [
                *(
                    text(name, middle, top + 25 + NAME_LINE * i, "bar-label strong", "middle")
                    for i, name in enumerate(names)
                ),
                text(f"{kib(region.bytes)} KiB", middle, size_y, "bar-label", "middle"),
                line(x, top + bar, x, top + bar + 8, "axis"),
            ]
            if x + OFFSET_WIDTH < WIDTH - RIGHT - OFFSET_WIDTH:  # where that of the end stands
                parts.append(text(f"{region.offset:#x}", x, top + bar + 22, "label mono"))
    for number, row in enumerate(rows):
        parts += [text(each.content, each.x, top - 8 - LABEL_LINE * number, "label", each.anchor) for each in row]
    parts.append(text(f"{shared.total_bytes:#x}", WIDTH - RIGHT, top + bar + 22, "label mono", "end"))
    listed = ", ".join(f"{region.name} at {region.offset}" for region in shared.regions)
    return picture(
        "shared-map",
        WIDTH,
        top + bar + 32,
        "Shared memory map",
        f"{shared.total_bytes} bytes of dynamic shared memory, by byte offset: {listed}.",
        parts,
    )


def _broken(name: str, width: float) -> list[str]:
    """A name as lines that fit a width."""
    most = int((width - NAME_GAP) / NAME_LETTER)
    return [name] if len(name) <= most else textwrap.wrap(name, most)


@dataclass(frozen=True)
class _Label:
    """A line of text above the bar, from its x or up to it."""

    content: str
    x: float
    anchor: str = "start"

    @property
    def width(self) -> float:
        return LABEL_LETTER * len(self.content)

    @property
    def left(self) -> float:
        return self.x - self.width if self.anchor == "end" else self.x


def _labels(regions: tuple[SharedRegion, ...], is_narrow: list[bool], scale: float) -> Iterator[_Label]:
    for narrow, run in groupby(zip(is_narrow, regions, strict=True), key=itemgetter(0)):
        of_run = [region for _, region in run]
        if narrow:
            yield _label_of_narrow(of_run, scale)
        else:
            yield from _notes(of_run, scale)


def _notes(regions: list[SharedRegion], scale: float) -> Iterator[_Label]:
    """What there is to say of regions; of neighbours that have no room for it each, once."""
    for note, run in groupby(regions, key=lambda region: region.note):
        furthest = WIDTH - RIGHT - LABEL_LETTER * len(note)
        labels = [_Label(note, max(LEFT, min(LEFT + region.offset * scale + 1, furthest))) for region in run]
        each_fits = labels[0].width <= min((b.x - a.x for a, b in pairwise(labels)), default=WIDTH)
        yield from (labels if each_fits else labels[:1]) if note else ()


def _label_of_narrow(regions: list[SharedRegion], scale: float) -> _Label:
    """Above regions that have no room for a name, which share one label if they are neighbours."""
    first, last = regions[0], regions[-1]
    if len(regions) == 1:
        content = f"{first.name}, {first.bytes:,} bytes ({first.note})"
    else:
        content = f"{', '.join(region.name for region in regions)}: {last.end - first.offset:,} bytes"
    begins, ends = _Label(content, LEFT + first.offset * scale), _Label(content, LEFT + last.end * scale, "end")
    if first.offset == 0 or ends.left < LEFT:
        return begins if begins.left + begins.width <= WIDTH else _Label(content, LEFT)
    return ends


def _in_rows(labels: Iterator[_Label]) -> list[list[_Label]]:
    """Labels that would run into each other are in different rows, the first of which is the lowest."""
    rows: list[list[_Label]] = []
    for label in sorted(labels, key=lambda label: label.left):
        for row in rows:
            if row[-1].left + row[-1].width + LABEL_GAP <= label.left:
                row.append(label)
                break
        else:
            rows.append([label])
    return rows
