"""A block in shared memory with and without swizzle, side by side."""

from __future__ import annotations

from html import escape

from flashwright.explain.facts import MatrixLoad
from flashwright.explain.pictures.banks import banks_picture


def bank_panels(loads: tuple[MatrixLoad, ...], caption: str) -> str:
    """Of two layouts, of which the first is the config's own."""
    panels = "".join(
        f"<div><h3>{'With' if load.swizzled else 'Without'} swizzle{' (this config)' if load is loads[0] else ''}</h3>"
        f"{banks_picture(load, f'banks-{index}')}</div>"
        for index, load in enumerate(sorted(loads, key=lambda load: load.swizzled))
    )
    return f'<figure><div class="panels">{panels}</div><figcaption>{escape(caption)}</figcaption></figure>'
