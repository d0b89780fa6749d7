"""`flashwright plan`: what attention over many GPUs costs by each strategy."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.table import Table

from flashwright.cli.attention_options import WindowOption, attention_options
from flashwright.cli.output import CAUSAL, D_HEAD, JsonOption, print_json, table_console
from flashwright.distributed.layouts import NAMED_LAYOUTS
from flashwright.distributed.links import ACHIEVED, LINKS, link_named
from flashwright.distributed.published import comparisons
from flashwright.problem.dtypes import DType
from flashwright.workbench.planning import Plan, PlanProblem, plan

_UNITS = {"": 1, "K": 2**10, "M": 2**20}
PADDED = 100
"""Columns from which on the table has room beside its numbers."""


def plan_command(
    gpus: Annotated[int, typer.Option(help="GPUs that share the sequence.")] = 8,
    tokens: Annotated[str, typer.Option(help="Of the whole sequence: 1048576, 128K (· 1024), 1M (· 1024²).")] = "128K",
    heads: Annotated[str, typer.Option(help="Heads of q, and of k and v: 64/8, or 32 for both.")] = "32/8",
    d_head: Annotated[int, typer.Option(*D_HEAD, help="Head dimension.")] = 128,
    link: Annotated[str, typer.Option(help=f"What connects the machines, or all GPUs: {', '.join(LINKS)}.")] = "nvlink",
    gpus_per_machine: Annotated[int, typer.Option(help="GPUs of a machine, which NVLink connects.")] = 8,
    causal: Annotated[bool, typer.Option(*CAUSAL, help="Mask.")] = True,
    window: WindowOption = None,
    layout: Annotated[str, typer.Option(help=f"Who holds what: {' or '.join(NAMED_LAYOUTS)}.")] = "zigzag",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    dtype: Annotated[str, typer.Option(help="FP16 or BF16.")] = "BF16",
    gpu: Annotated[str, typer.Option(help="The GPU whose measured kernels compute.")] = "h200",
    tflops: Annotated[
        str | None, typer.Option(metavar="FORWARD/BACKWARD", help="Speeds of one GPU, instead of measured ones.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Model attention over many GPUs: bytes sent, times, efficiency and memory by strategy. Nothing is run.

    A round of a ring takes the longer of computing it and sending the next one. Speeds of kernels are measured ones of
    one GPU; links reach 80% of their peak. The last lines compare the model with published figures.
    """
    q_heads, kv_heads = map(int, _pair("heads", heads, r"\d+", "64/8"))
    link_named(link)
    problem = PlanProblem(
        gpus, _tokens(tokens), q_heads, kv_heads, d_head, batch, DType.parse(dtype),
        attention_options(causal, window, 0.0).window, layout, gpus_per_machine, link,
    )  # fmt: skip
    speeds = None
    if tflops is not None:
        forward, backward = map(float, _pair("tflops", tflops, r"\d+(?:\.\d+)?", "612.5/450"))
        speeds = (forward, backward)
    found = plan(problem, gpu, speeds)
    if as_json:
        print_json(found.to_dict(), "plan")
    else:
        _print_plan(found)


def _tokens(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if match is None:
        raise ValueError(f"--tokens: {text!r} is not a number of tokens; expected e.g. 65536, 128K or 1M")
    return int(match[1]) * _UNITS[match[2]]


def _pair(name: str, text: str, number: str, example: str) -> tuple[str, str]:
    """Two numbers, or one for both."""
    match = re.fullmatch(rf"({number})(?:/({number}))?", text.strip())
    if match is None:
        raise ValueError(f"--{name}: {text!r} is not a pair; expected e.g. {example}")
    return match[1], match[2] or match[1]


def _print_plan(found: Plan) -> None:
    console = table_console()
    problem = found.problem
    left, right, _ = problem.window
    mask = (
        "full"
        if (left, right) == (None, None)
        else "causal"
        if (left, right) == (None, 0)
        else f"window {left}, {right}"
    )
    table = Table(
        title=f"{problem.tokens:,} tokens, {problem.q_heads}/{problem.kv_heads} heads of {problem.head_dim}, {mask}, "
        f"{problem.layout}, on {problem.gpus} × {found.gpu}",
        caption=f"Of one layer, per GPU. Kernels: {found.machine.forward_flops_per_s / 1e12:.0f} TFLOP/s forward, "
        f"{found.machine.backward_flops_per_s / 1e12:.0f} backward; links at {ACHIEVED:.0%} of their peak.",
        padding=(0, 1 if console.width >= PADDED else 0),
    )
    table.add_column("strategy")
    sent = ("sent\nforward\nMiB", "sent\nbackward\nMiB")
    for name in (*sent, "compute\nms", "messages\nms", "step\nms", "efficiency", "memory\nGiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for cost in found.costs:
        table.add_row(
            str(cost.strategy),
            f"{cost.forward.sent_bytes / 2**20:,.0f}",
            f"{cost.backward.sent_bytes / 2**20:,.0f}",
            f"{1e3 * (cost.forward.compute_s + cost.backward.compute_s):,.2f}",
            f"{1e3 * (cost.forward.communication_s + cost.backward.communication_s):,.2f}",
            f"{1e3 * cost.time_s:,.2f}",
            f"{cost.efficiency:.0%}",
            f"{cost.memory_bytes / 2**30:,.2f}",
        )
    console.print(table)
    rows = comparisons()
    console.print(
        f"The model against {len(rows)} efficiencies that ring-flash-attention published: "
        f"{100 * found.least_off:+.1f} to {100 * found.most_off:+.1f} points off.",
        highlight=False,
    )
    for each in rows:
        console.print(
            f"  {each.figure.gpu.name}, {each.figure.layout}, {each.operation}: "
            f"{each.published:.1%} published, {each.modelled:.1%} modelled",
            highlight=False,
        )
