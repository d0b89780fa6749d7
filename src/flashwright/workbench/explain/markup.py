"""The parts of a page: the document with its stylesheet, sections, tables and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib import resources

NUMBERS = "#"
"""Marks a column, in front of its name, as one of numbers."""
JUDGEMENTS = {True: "better", False: "worse", None: ""}
"""Classes of what speaks for a config, or against it."""


@dataclass(frozen=True)
class Tile:
    """One figure at the top of a page."""

    name: str
    value: str
    note: str = ""
    class_: str = ""


def document(title: str, header: str, body: str, footer: str, data: object = None) -> str:
    """A whole page, in one file: nothing is fetched from anywhere.

    ``data`` is what the page's own script reads; without it there is no script. What the script adds is comfort: the
    page has all facts without it.
    """
    style = _resource("page.css")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header class="top">{header}</header>
<main>{body}</main>
<footer>{footer}</footer>{"" if data is None else _script(data)}
</body>
</html>
"""


def _script(data: object) -> str:
    written = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return f"""
<script type="application/json" id="page-data">{written}</script>
<script>
{_resource("page.js")}</script>"""


def _resource(name: str) -> str:
    return (resources.files("flashwright.workbench.explain") / name).read_text("utf-8")


def section(key: str, title: str, html: str) -> str:
    return f'<section id="{key}"><h2>{escape(title)}</h2>{html}</section>'


def short_form(config: str) -> str:
    """The name of a config, which lines break behind an option of."""
    return f"<code>{escape(config).replace('+', '+<wbr>')}</code>"


def breakable(text: str) -> str:
    """Text whose lines may break within a name: behind an option of a config, and behind an underscore."""
    return re.sub(r"(?<=\w)[+_](?=\w)", r"\g<0><wbr>", escape(text))


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def figure(picture: str, caption: str = "", size: str = "wide") -> str:
    """A picture that scrolls within its place where the screen is too narrow for it."""
    text = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure class="{size}"><div class="scroll" tabindex="0">{picture}</div>{text}</figure>'


def tiles(each: Iterable[Tile]) -> str:
    items = "".join(
        f"<div><dt>{breakable(tile.name)}</dt><dd{_class(tile.class_)}>{escape(tile.value)}"
        f"<small>{escape(tile.note)}</small></dd></div>"
        for tile in each
    )
    return f'<dl class="figures">{items}</dl>'


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def wide_table(columns: Iterable[str], rows: Iterable[str], class_: str) -> str:
    """A table with a hint that it scrolls, where the screen is too narrow for it."""
    return f'<div class="wide">{table(columns, rows, class_)}</div>'


def table(columns: Iterable[str], rows: Iterable[str], class_: str = "facts") -> str:
    head = "".join(_column(name) for name in columns)
    body = "".join(rows)
    return (
        f'<div class="scroll"><table class="{class_}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _column(name: str) -> str:
    if not name:
        return "<td></td>"
    title = breakable(name.removeprefix(NUMBERS))
    return (
        f'<th scope="col" class="number">{title}</th>' if name.startswith(NUMBERS) else f'<th scope="col">{title}</th>'
    )


def row(name: str, cells: str, class_: str = "", link: str = "") -> str:
    """A table row under its own heading, which may lead somewhere."""
    heading = f'<a href="{escape(link)}">{breakable(name)}</a>' if link else breakable(name)
    return f'<tr{_class(class_)}><th scope="row">{heading}</th>{cells}</tr>'


def heading_row(title: str, columns: int) -> str:
    """A row that names those below it."""
    return f'<tr class="group"><th scope="rowgroup" colspan="{columns}">{escape(title)}</th></tr>'


def numbers(values: Iterable[str]) -> str:
    return "".join(number(value) for value in values)


def number(value: str, class_: str = "") -> str:
    return f'<td class="number {class_}">{escape(value)}</td>' if class_ else f'<td class="number">{escape(value)}</td>'


def note(text: str, columns: int = 1) -> str:
    span = f' colspan="{columns}"' if columns > 1 else ""
    return f'<td class="note"{span}>{breakable(text)}</td>'
