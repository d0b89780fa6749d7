"""Long simulations: how far they are, and how they end on Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from flashwright.interruption import INTERRUPTED


@contextmanager
def simulating(keep_stdout: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Yields what a launch calls with the thread blocks that are done and those of the grid.

    A terminal shows a bar; Ctrl-C ends the command with a message and exit code 130. ``keep_stdout`` keeps standard
    output for the command's own report: what a kernel prints goes to standard error.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("thread blocks"),
        TimeElapsedColumn(),
    )
    started, reached = time.monotonic(), (0, 0)
    with (
        redirect_stdout(sys.stderr if keep_stdout else sys.stdout),
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=None)

        def report(done: int, blocks: int) -> None:
            nonlocal reached
            reached = (done, blocks)
            bar.update(task, completed=done, total=blocks)

        try:
            yield report
        except KeyboardInterrupt:
            bar.stop()
            done, blocks = reached
            where = f": {done:,} of {blocks:,} thread blocks were simulated" if blocks else ""
            console.print(f"interrupted after {time.monotonic() - started:.0f} s{where}", highlight=False)
            raise typer.Exit(INTERRUPTED) from None
