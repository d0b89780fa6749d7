"""Code blocks of pages, found and executed.

Comments in front of a block say what it needs beside the blocks above it on its page:

<!-- runs: gpu -->                  a GPU
<!-- setup: q = k = v = … -->       lines that a reader does not have to see

A `text` block directly below a Python block is what the Python block prints.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(
    r"(?P<comments>(?:^<!-- (?:runs|setup):\s(?:(?!-->).)*-->\n+)*)"
    r"^```(?P<language>\w+)\n(?P<text>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
_COMMENT = re.compile(r"<!-- (runs|setup):\s(.*?)\s*-->", re.DOTALL)
SHELLS = ("bash", "sh", "console")


@dataclass(frozen=True)
class CodeBlock:
    line: int
    """Where it begins on its page."""
    language: str
    text: str
    runs: str
    """What it needs: `gpu`, or nothing."""
    setup: str
    output: str | None
    output_span: tuple[int, int]

    @property
    def commands(self) -> list[str]:
        """The lines of a shell's block, comments removed."""
        lines = self.text.replace("\\\n", " ").splitlines()
        commands = (re.sub(r"(^|\s+)#.*$", "", line).strip() for line in lines)
        return [re.sub(r"\s+", " ", command) for command in commands if command]


def code_blocks(page: str) -> list[CodeBlock]:
    found = []
    for match in _BLOCK.finditer(page):
        comments = dict(_COMMENT.findall(match["comments"]))
        found.append(
            CodeBlock(
                line=page.count("\n", 0, match.start("text")),
                language=match["language"],
                text=match["text"],
                runs=comments.get("runs", ""),
                setup=comments.get("setup", ""),
                output=match["output"] if match["language"] == "python" else None,
                output_span=match.span("output"),
            )
        )
    return found


def run_python(block: CodeBlock, names: dict[str, Any], page: str) -> str:
    """Executes a block among the names that blocks above it have defined; returns what it prints."""
    printed = io.StringIO()
    exec(compile(block.setup, f"{page}: setup", "exec"), names)
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * block.line + block.text, page, "exec"), names)
    return printed.getvalue()


def with_outputs(page: str, name: str) -> str:
    """A page with what its Python blocks print in the blocks below them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shift = 0
    for block in code_blocks(page):
        if block.language != "python":
            continue
        printed = run_python(block, names, name)
        if block.output is not None:
            start, end = (place + shift for place in block.output_span)
            page = page[:start] + printed + page[end:]
            shift += len(printed) - (end - start)
    return page
