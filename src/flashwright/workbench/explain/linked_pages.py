"""The page of a config and those of its neighbours, in one directory, with links from one to another."""

from __future__ import annotations

import re
from pathlib import Path

from flashwright.kernels.registry import parse_config
from flashwright.workbench.bench.result_files import write_atomically
from flashwright.workbench.explain.facts import ConfigFacts
from flashwright.workbench.explain.gather import explain_config
from flashwright.workbench.explain.knob_pages import knob_links
from flashwright.workbench.explain.page import config_page

INDEX = "index.html"


def write_linked_pages(facts: ConfigFacts, directory: Path, *, progress: bool = True) -> list[Path]:
    """The config's own page first; then one of every neighbour that a kernel can be built from."""
    links = {each.change: _file_name(each.change) for each in facts.neighbours if each.config is not None}
    pages = [directory / INDEX]
    write_atomically(pages[0], config_page(facts, _knob_links(facts, directory), links).encode())
    for each in facts.neighbours:
        if each.config is not None:
            known = explain_config(each.config, facts.arch, turning=(), sample=facts.sample, progress=progress)
            page = config_page(known, _knob_links(known, directory), neighbour_of=(facts.config, INDEX))
            pages.append(directory / links[each.change])
            write_atomically(pages[-1], page.encode())
    return pages


def _knob_links(facts: ConfigFacts, directory: Path) -> dict[str, str]:
    return knob_links(parse_config(facts.config), directory)


def _file_name(change: str) -> str:
    """`B_r-64-32.html` of "B_r: 64 → 32"."""
    return f"{re.sub(r'[^A-Za-z0-9_]+', '-', change).strip('-')}.html"
