"""Just enough SVG: elements as text, escaped, with a title and a description that screen readers find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

DIGIT, COUNT_GAP = 8, 8


def tag(name: str, /, *children: str, **attributes: object) -> str:
    """`<name …>children</name>`; in attribute names `_` stands for `-`, and `class_` for `class`."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(children)
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def text(content: object, x: float, y: float, class_: str = "", anchor: str = "start", **attributes: object) -> str:
    """A line of text whose baseline begins, is centred or ends at (x, y)."""
    return tag(
        "text",
        escape(str(content)),
        x=x,
        y=y,
        class_=class_ or None,
        text_anchor=None if anchor == "start" else anchor,
        **attributes,
    )


def counted_label(label: str, count: int, x: float, y: float) -> Iterator[str]:
    """A name and a count that end at x, with room for the count between them."""
    yield text(label, x - max(32, COUNT_GAP + DIGIT * len(str(count))), y, "label", "end")
    yield text(count, x, y, "label count", "end")


def rect(x: float, y: float, width: float, height: float, class_: str = "", title: str = "", **more: object) -> str:
    children = [tag("title", escape(title))] if title else []
    return tag("rect", *children, x=x, y=y, width=width, height=height, class_=class_ or None, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str = "") -> str:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_ or None)


def picture(name: str, width: float, height: float, title: str, description: str, parts: Iterable[str]) -> str:
    """The whole element. `name` makes its ids unique on the page, and is its class."""
    return tag(
        "svg",
        tag("title", escape(title), id=f"{name}-title"),
        tag("desc", escape(description), id=f"{name}-desc"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        class_=f"picture {name}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
