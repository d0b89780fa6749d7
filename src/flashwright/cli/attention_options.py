"""What commands share that take attention's own arguments: masks, soft cap, heads, lengths."""

from __future__ import annotations

from typing import Annotated

import typer

from flashwright.cli.output import CAUSAL, KEYS
from flashwright.problem.lengths import MAX_LENGTH
from flashwright.problem.options import AttentionOptions
from flashwright.workbench.sample import Sample

CausalOption = Annotated[bool, typer.Option(*CAUSAL, help="A row attends to no later key.")]
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
    int | None, typer.Option(*KEYS, min=1, max=MAX_LENGTH, help="Rows of k and v.", show_default="as many as of q")
]
# Of problems that are simulated to be examined; their sizes follow from the config unless given.
SampleHeadsOption = Annotated[
    int | None, typer.Option(min=1, help="Heads of q.", show_default="2 per head of k and v, if those are given")
]
SampleKvHeadsOption = Annotated[
    int | None, typer.Option(min=1, help="Heads of k and v; fewer than q has: grouped heads.")
]
SampleKeysOption = Annotated[
    int | None,
    typer.Option(*KEYS, min=1, max=MAX_LENGTH, help="Rows of k and v.", show_default="as many as the steps shown"),
]


def sample_of(
    causal: bool, window: str | None, softcap: float, heads: int | None, kv_heads: int | None, keys: int | None
) -> Sample:
    return Sample(attention_options(causal, window, softcap), heads, kv_heads, keys)


def attention_options(causal: bool, window: str | None, softcap: float) -> AttentionOptions:
    """The options as `attention()` checks them."""
    return AttentionOptions.of(causal, None if window is None else parse_window(window), None, softcap)


def parse_window(text: str) -> tuple[int, int]:
    """LEFT,RIGHT."""
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError as error:
        raise ValueError(f"--window: {text!r} is not a window; expected LEFT,RIGHT, e.g. 1024,0 or -1,64") from error
    return left, right
