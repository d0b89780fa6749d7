"""What commands share that take attention's own arguments: masks, soft cap, heads, lengths."""

from __future__ import annotations

from typing import Annotated

import typer

from flashwright.problem.lengths import MAX_LENGTH
from flashwright.problem.options import AttentionOptions

CausalOption = Annotated[bool, typer.Option("--causal", help="A row attends to no later key.")]
WindowOption = Annotated[
    str | None,
    typer.Option(
        metavar="LEFT,RIGHT", help="Keys before and after its own that a row attends to; -1: all.", show_default="all"
    ),
]
SoftcapOption = Annotated[float, typer.Option(help="Soft cap c of the scores: c·tanh(s/c); 0: none.")]
KvHeadsOption = Annotated[
    int | None, typer.Option(min=1, help="Heads of k and v, which divide those of q.", show_default="as many as q has")
]
KeysOption = Annotated[
    int | None, typer.Option(min=1, max=MAX_LENGTH, help="Rows of k and v.", show_default="as many as of q")
]


def attention_options(causal: bool, window: str | None, softcap: float) -> AttentionOptions:
    """The options as `attention()` checks them."""
    return AttentionOptions.of(causal, None if window is None else _window(window), None, softcap)


def _window(text: str) -> tuple[int, int]:
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError as error:
        raise ValueError(f"--window: {text!r} is not a window; expected LEFT,RIGHT, e.g. 1024,0 or -1,64") from error
    return left, right
