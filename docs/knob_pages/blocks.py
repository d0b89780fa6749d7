"""Generated blocks in hand-written pages.

<!-- begin generated: NAME: ARGUMENTS -->
… rewritten whenever the page is filled …
<!-- end generated -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

Renderer = Callable[[str], str]
"""From a block's arguments to its content."""

_BLOCK = re.compile(
    r"(?P<begin><!-- begin generated: (?P<name>[\w-]+)(?:: (?P<arguments>[^\n]*?))? -->\n)"
    r"(?P<content>.*?)(?P<end><!-- end generated -->)",
    re.DOTALL,
)


def filled(text: str, renderers: Mapping[str, Renderer]) -> str:
    """A page with the content of every block made anew."""
    if text.count("<!-- begin generated: ") != len(_BLOCK.findall(text)):
        raise ValueError("a generated block is not closed by '<!-- end generated -->', or has no name")

    def content(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in renderers:
            raise ValueError(f"generated block {name!r} is not known; allowed: {', '.join(renderers)}")
        return f"{match['begin']}\n{renderers[name](match['arguments'] or '').strip()}\n\n{match['end']}"

    return _BLOCK.sub(content, text)


def block_names(text: str) -> list[str]:
    """The names of a page's blocks, in order."""
    return [match["name"] for match in _BLOCK.finditer(text)]
