"""`flashwright which`: the kernel that attention() runs for a problem on a GPU, and where its config comes from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from flashwright.cli.attention_options import (
    CausalOption,
    KeysOption,
    KvHeadsOption,
    SoftcapOption,
    WindowOption,
    attention_options,
)
from flashwright.cli.output import D_HEAD, ROWS, JsonOption, print_json, table_console
from flashwright.hardware.models import gpu_named, gpu_names
from flashwright.kernels.registry import family_named, family_names
from flashwright.operators.chosen import CallProblem, KernelChoice, kernel_choice
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import MAX_LENGTH
from flashwright.problem.shapes import check_shapes
from flashwright.runtime.devices import this_gpu


def which(
    gpu: Annotated[
        str | None,
        typer.Option(
            help=f"A GPU: {', '.join(gpu_names())}; the driver's name of another; or an architecture, e.g. sm_90.",
            show_default="this machine's",
        ),
    ] = None,
    d_head: Annotated[int, typer.Option(*D_HEAD, help="Head dimension.")] = 128,
    rows: Annotated[int, typer.Option(*ROWS, min=1, max=MAX_LENGTH, help="Rows of q.")] = 4096,
    keys: KeysOption = None,
    dtype: Annotated[str, typer.Option(help="FP16 or BF16.")] = "BF16",
    causal: CausalOption = False,
    window: WindowOption = None,
    softcap: SoftcapOption = 0.0,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Heads of q.")] = 16,
    kv_heads: KvHeadsOption = None,
    family: Annotated[
        str | None,
        typer.Option(help=f"Kernel family: {' or '.join(family_names())}.", show_default="what attention() uses"),
    ] = None,
    row_invariant: Annotated[
        bool, typer.Option("--row-invariant", help="As attention(row_invariant=True) chooses.")
    ] = False,
    training: Annotated[
        bool, typer.Option("--training", help="With gradients: their kernel, too, and no decode kernel.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="In training: as attention(deterministic=True) chooses.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say which kernel attention() runs for a problem on a GPU, and why: your tuning, a shipped result, or a rule.

    With --training, say also which computes the gradients. Needs no GPU if one is named. The last line is the command
    that shows all there is to know about the kernel.
    """
    if deterministic and not training:
        raise ValueError("--deterministic is about gradients: it needs --training")
    model = this_gpu() if gpu is None else gpu_named(gpu)
    keys = rows if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads
    kv_shape = (batch, kv_heads, keys, d_head)
    check_shapes((batch, heads, rows, d_head), kv_shape, kv_shape)
    if family is not None:
        family_named(family)
    problem = CallProblem(
        DType.parse(dtype), d_head, rows, keys, attention_options(causal, window, softcap),
        batch=batch, heads=heads, kv_heads=kv_heads, row_invariant=row_invariant, training=training,
        deterministic=deterministic,
    )  # fmt: skip
    choice = kernel_choice(problem, model, family=family)
    if as_json:
        print_json(choice.to_dict(), "which")
    else:
        _print_choice(choice)


def _print_choice(choice: KernelChoice) -> None:
    console = table_console()
    where = f"{choice.gpu.name} ({choice.gpu.arch})" if choice.gpu.name else f"any {choice.gpu.arch}"
    lines = [f"{choice.problem} on {where}", *_lines(choice)]
    if choice.gradients is not None:
        lines += ["Gradients:", *_lines(choice.gradients)]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _lines(choice: KernelChoice) -> tuple[str, ...]:
    return (
        f"[bold]{escape(str(choice.config))}[/]  {choice.family} family",
        f"{choice.source}: {escape(choice.reason)}",
        escape(choice.explain_command),
    )
