"""Shared memory of a thread block, from the first byte to the last."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

from flashwright.kernels.explanation import SharedMap, SharedRegion
from flashwright.workbench.explain.pictures.regions import region_class
from flashwright.workbench.explain.pictures.svg import line, picture, rect, text
from flashwright.workbench.quantities import kib

WIDTH, LEFT, RIGHT = 1160, 2, 2
TOP, BAR = 26, 56
NARROWEST_NAMED = 60


def shared_map_picture(shared: SharedMap) -> str:
    scale = (WIDTH - LEFT - RIGHT) / shared.total_bytes
    parts = []
    for region in shared.regions:
        x, width = LEFT + region.offset * scale, region.bytes * scale
        tooltip = f"{region.name}: {region.bytes} bytes"
        parts.append(rect(x, TOP, max(width - 2, 2), BAR, f"region {region_class(region.operand)}", tooltip))
        if width < NARROWEST_NAMED:
            continue
        parts += [
            text(region.name, x + width / 2, TOP + 25, "bar-label strong", "middle"),
            text(f"{kib(region.bytes)} KiB", x + width / 2, TOP + 43, "bar-label", "middle"),
            line(x, TOP + BAR, x, TOP + BAR + 8, "axis"),
            text(f"{region.offset:#x}", x, TOP + BAR + 22, "label mono"),
            text(region.note, x + 1, TOP - 8, "label"),
        ]
    is_narrow = [region.bytes * scale < NARROWEST_NAMED for region in shared.regions]
    for narrow, run in groupby(zip(is_narrow, shared.regions, strict=True), key=itemgetter(0)):
        if narrow:
            parts.append(_label_of_narrow([region for _, region in run], scale))
    parts.append(text(f"{shared.total_bytes:#x}", WIDTH - RIGHT, TOP + BAR + 22, "label mono", "end"))
    names = ", ".join(f"{region.name} at {region.offset}" for region in shared.regions)
    return picture(
        "shared-map",
        WIDTH,
        TOP + BAR + 32,
        "Shared memory map",
        f"{shared.total_bytes} bytes of dynamic shared memory, by byte offset: {names}.",
        parts,
    )


def _label_of_narrow(regions: list[SharedRegion], scale: float) -> str:
    """Above regions that have no room for a name, which share one label if they are neighbours."""
    first, last = regions[0], regions[-1]
    if len(regions) == 1:
        label = f"{first.name}, {first.bytes} bytes ({first.note})"
    else:
        label = f"{', '.join(region.name for region in regions)}: {last.end - first.offset} bytes"
    left, right = LEFT + first.offset * scale, LEFT + last.end * scale
    return text(label, left, TOP - 8, "label") if left == LEFT else text(label, right, TOP - 8, "label", "end")
