"""What the commands share in how they print: tables on a terminal, JSON for machines."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

FILE_COLUMNS = 200
"""Width of tables that do not go to a terminal."""

# One name for one thing in every command. The second spelling of each is that of other tools, or of earlier versions.
D_HEAD = ("--d-head", "--head-dim")
ROWS = ("--rows", "--seqlen")
KEYS = ("--keys", "--kv-seqlen")
CAUSAL = ("--causal/--no-causal", " /--full")

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


class TableConsole(Console):
    """Prints tables whole: lines that are too long for a terminal are wrapped by it, and no number is cut."""

    def print(self, *objects: Any, **options: Any) -> None:
        unbounded = self.options.update(max_width=FILE_COLUMNS)
        least = (Measurement.get(self, unbounded, each).minimum for each in objects if isinstance(each, Table))
        shown = self.width
        self.width = max(shown, *least, 0)
        super().print(*objects, **options)
        self.width = shown


def table_console() -> Console:
    """The terminal, or a wide page where standard output is none."""
    console = TableConsole()
    return console if console.is_terminal else TableConsole(width=FILE_COLUMNS)


FORMAT_VERSIONS = {"bench": 2}
"""Of what commands print as JSON; that of a command that is not listed is 1. docs/json.md describes them."""


def json_text(document: dict[str, Any], command: str) -> str:
    """What a command found, with its schema: the command, and the version of its format."""
    schema = f"{command}/{FORMAT_VERSIONS.get(command, 1)}"
    return json.dumps({"schema": schema, **document}, indent=2, ensure_ascii=False)


def message_of(error: Exception) -> str:
    """What an error says to a user: of a file, which one and what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def print_json(document: dict[str, Any], command: str) -> None:
    print(json_text(document, command))
