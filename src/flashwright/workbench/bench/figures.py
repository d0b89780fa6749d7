"""Shared by all plots: colours, sizes, and files with the same bytes for the same numbers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from flashwright.workbench.bench.result_files import ResultFileError, check_destination, write_atomically

PLOT_FORMATS = ("png", "svg")
OURS_COLOUR = "#d55e00"
PEER_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Okabe and Ito's colours, distinguishable with colour-blindness, and two more."""
QUIET = "#666666"
_STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "svg.fonttype": "none",  # text stays text: searchable, and small
    "svg.hashsalt": "flashwright",
}


def style() -> Any:
    """The context in which figures are drawn."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def plot_files(target: Path, name: str) -> list[Path]:
    """The files that `--plot TARGET` means: that file, or `name` in every format in that directory."""
    if target.is_dir():
        return [target / f"{name}.{suffix}" for suffix in PLOT_FORMATS]
    if target.suffix.lstrip(".") not in PLOT_FORMATS:
        raise ResultFileError(f"plot: {target} is not allowed; allowed: a file named .png or .svg, or a directory")
    check_destination(target)
    return [target]


def save_figure(figure: Any, files: list[Path]) -> None:
    """Writes a figure to each file, whole or not at all."""
    for path in files:
        buffer = io.BytesIO()
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with style():
            figure.savefig(buffer, format=path.suffix.lstrip("."), dpi=150, metadata=metadata, facecolor="white")
        write_atomically(path, buffer.getvalue())


def new_figure(width_inches: float, height_inches: float) -> Any:
    """A figure of its own, with none of pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
