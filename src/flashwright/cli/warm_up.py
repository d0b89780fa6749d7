"""`flashwright warm-up`: compiles ahead what a model will need."""

from __future__ import annotations

from typing import Annotated

import typer

from flashwright.attention import warm_up as compile_ahead
from flashwright.cli.attention_options import WindowOption, parse_window
from flashwright.cli.output import CAUSAL, D_HEAD, JsonOption, print_json
from flashwright.kernels.registry import family_names
from flashwright.workbench.quantities import counted


def warm_up(
    head_dim: Annotated[
        list[int], typer.Option(*D_HEAD, help="Head dimension of the model; may be given several times.")
    ],
    dtype: Annotated[list[str], typer.Option(help="FP16 or BF16; may be given several times.")] = ["BF16"],  # noqa: B006
    causal: Annotated[bool | None, typer.Option(*CAUSAL, help="Mask.", show_default="with and without")] = None,
    window: WindowOption = None,
    window_left: Annotated[int | None, typer.Option(hidden=True, help="The left side of --window.")] = None,
    window_right: Annotated[int | None, typer.Option(hidden=True, help="Its right side.")] = None,
    softcap: Annotated[float, typer.Option(help="Soft cap of the scores; 0: none.")] = 0.0,
    grouped: Annotated[bool, typer.Option("--grouped", help="q has more heads than k and v.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Gradients will be computed too.")] = False,
    packed: Annotated[bool, typer.Option("--packed", help="Sequences packed by cu_seqlens.")] = False,
    family: Annotated[
        str | None,
        typer.Option(help=f"Kernel family: {' or '.join(family_names())}.", show_default="what attention() uses"),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="What to compile for, e.g. sm_90.", show_default="this machine's GPU")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the kernels that attention() will need into the cache, in parallel, whatever the lengths.

    The first use of each kind of call compiles for a second or two otherwise.
    """
    sides = _window(window, window_left, window_right)
    kernels = []
    for each_head_dim in head_dim:
        for each_dtype in dtype:
            for mask in (False, True) if causal is None else (causal,):
                kernels += compile_ahead(
                    each_head_dim, each_dtype, causal=mask, window=sides, softcap=softcap,
                    grouped=grouped, training=training, packed=packed, family=family, arch=arch, progress=not as_json,
                )  # fmt: skip
    if as_json:
        print_json(
            {
                "kernels": [
                    {"config": str(kernel.config), "arch": kernel.arch, "from_cache": kernel.program.from_cache}
                    for kernel in kernels
                ]
            },
            "warm-up",
        )
        return
    fresh = sum(not kernel.program.from_cache for kernel in kernels)
    verb = "is" if len(kernels) == 1 else "are"
    print(f"{counted(len(kernels), 'kernel')} {verb} ready, {fresh} of them compiled just now")


def _window(window: str | None, left: int | None, right: int | None) -> tuple[int, int]:
    """By one option, or by one for each side."""
    if window is None:
        return -1 if left is None else left, -1 if right is None else right
    if left is not None or right is not None:
        raise ValueError("--window: not together with --window-left and --window-right, which are its sides")
    return parse_window(window)
