"""Where the documentation has a page on each knob of a config: in the source tree that the package runs from."""

from __future__ import annotations

import os
from pathlib import Path

from flashwright.kernels.family import KernelConfig
from flashwright.workbench.explain.explanations import explanation_of

SOURCE_TREE = Path(__file__).parents[4]
"""Of a checkout. An installed package has no pages beside it."""


def knob_pages(config: KernelConfig, tree: Path = SOURCE_TREE) -> dict[str, Path]:
    """By knob, the pages that there are."""
    folder = explanation_of(config).knob_pages
    if folder is None:
        return {}
    pages = {name: tree / folder / f"{name}.md" for name in config.__dataclass_fields__}
    return {name: page for name, page in pages.items() if page.is_file()}


def knob_links(config: KernelConfig, directory: Path, tree: Path = SOURCE_TREE) -> dict[str, str]:
    """The same as links from a page in a directory, which hold as long as both stay where they are."""
    return {
        name: Path(os.path.relpath(page, directory.resolve())).as_posix()
        for name, page in knob_pages(config, tree).items()
    }
