"""What the commands share that launch a user's kernel: `simulate` and `check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashwright.cli.kernel_arguments import ARGUMENT_HELP, parse_argument, parse_arguments
from flashwright.simulator.findings import HAZARD_KINDS, REACTIONS, HazardChecks, HazardKind, Reaction, reactions_to_all

LAUNCH_PANEL, CUDA_PANEL = "FILE.cu, FILE.ptx: the launch", "FILE.cu: the compiler"
KernelOption = Annotated[
    str | None,
    typer.Option(
        help="The kernel, if there are several; of CUDA also as fill<float, 4>.", rich_help_panel=LAUNCH_PANEL
    ),
]
GridOption = Annotated[str, typer.Option(help="Thread blocks, as X or X,Y,Z.", rich_help_panel=LAUNCH_PANEL)]
BlockOption = Annotated[str, typer.Option(help="Threads per block, as X or X,Y,Z.", rich_help_panel=LAUNCH_PANEL)]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        help="Thread blocks in a cluster, as X or X,Y,Z.",
        show_default="what the kernel was compiled for",
        rich_help_panel=LAUNCH_PANEL,
    ),
]
SpuriousWaitsOption = Annotated[
    bool,
    typer.Option(
        "--spurious-waits",
        help="Waits for mbarriers fail now and then, as they may on a GPU.",
        rich_help_panel=LAUNCH_PANEL,
    ),
]
SharedBytesOption = Annotated[int, typer.Option(min=0, help="Dynamic shared memory.", rich_help_panel=LAUNCH_PANEL)]
ArgOption = Annotated[list[str] | None, typer.Option(help=ARGUMENT_HELP, rich_help_panel=LAUNCH_PANEL)]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A __constant__ or __device__ variable; VALUE as of --arg.",
        rich_help_panel=LAUNCH_PANEL,
    ),
]
SeedOption = Annotated[int, typer.Option(help="Of random arguments.", rich_help_panel=LAUNCH_PANEL)]
IncludeOption = Annotated[
    list[Path] | None, typer.Option("--include", "-I", help="A directory of headers.", rich_help_panel=CUDA_PANEL)
]
DefineOption = Annotated[
    list[str] | None, typer.Option("--define", "-D", help="A macro, as NAME or NAME=VALUE.", rich_help_panel=CUDA_PANEL)
]
CompilerOption = Annotated[
    list[str] | None, typer.Option("--nvrtc", help="Another option of NVRTC.", rich_help_panel=CUDA_PANEL)
]
HazardsOption = Annotated[
    str | None,
    typer.Option(
        metavar="REACTION|KIND=REACTION,…",
        help="What happens on races, missing waits and uninitialised reads: "
        f"{', '.join(REACTIONS)}; or by kind ({', '.join(HAZARD_KINDS)}).",
        show_default="simulate: stop; check: collect",
    ),
]
StepLimitOption = Annotated[
    int | None,
    typer.Option(min=1, help="Jumps back after which a kernel is in an endless loop.", show_default="2,000,000"),
]


LAUNCH_PARAMETERS = {"kernel", "grid", "block", "cluster", "shared_bytes", "arg", "set_", "seed"}
"""Parameters of commands that say what is launched."""


def given_options(ctx: Any) -> dict[str, str]:
    """Parameter → option, as `set_` → `--set`, of what stands on the command line; ``ctx`` is a context of typer's."""
    sources = {parameter: ctx.get_parameter_source(parameter.name or "") for parameter in ctx.command.params}
    return {
        parameter.name or "": next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])
        for parameter, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def hazard_checks(text: str) -> HazardChecks:
    """`collect`, `race=stop,uninitialised-shared=ignore` or `collect,race=stop`, checked."""
    reactions: dict[HazardKind, Reaction] = {}
    others: dict[HazardKind, Reaction] = {}
    for part in text.split(","):
        kind, _, reaction = part.strip().rpartition("=")
        if reaction not in REACTIONS or (kind and kind not in HAZARD_KINDS):
            raise ValueError(
                f"--hazards: {part!r} is not allowed; allowed: {', '.join(REACTIONS)}, or KIND=REACTION with KIND one "
                f"of {', '.join(HAZARD_KINDS)}"
            )
        if kind:
            reactions[kind] = reaction
        else:
            others = reactions_to_all(reaction)
    return {**others, **reactions}


def launch_arguments(
    *,
    kernel: str | None,
    grid: str,
    block: str,
    cluster: str | None,
    shared_bytes: int,
    spurious_waits: bool,
    arg: Sequence[str] | None,
    set_: Sequence[str] | None,
    seed: int,
    include: Sequence[Path] | None,
    define: Sequence[str] | None,
    nvrtc: Sequence[str] | None,
    arch: str | None,
    step_limit: int | None,
) -> dict[str, Any]:
    """What `simulate_kernel` takes for the options of a command."""
    limits = {} if step_limit is None else {"step_limit": step_limit}
    return {
        "kernel": kernel,
        "grid": _dimensions("--grid", grid),
        "block": _dimensions("--block", block),
        "cluster": None if cluster is None else _dimensions("--cluster", cluster),
        "shared_bytes": shared_bytes,
        "spurious_waits": spurious_waits,
        "args": parse_arguments(arg or [], seed),
        "variables": _variables(set_ or [], seed),
        "include": include or [],
        "compiler_options": [*(f"--define-macro={macro}" for macro in define or []), *(nvrtc or [])],
        "arch": arch,
        **limits,
    }


def _dimensions(option: str, text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{option}: {text!r} is not a size; expected X, X,Y or X,Y,Z with positive integers")
    x, y, z = [*map(int, parts), 1, 1][:3]
    return x, y, z


def _variables(texts: Sequence[str], seed: int) -> Mapping[str, Any]:
    generator = np.random.default_rng(seed)
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set: {text!r} is not allowed; expected NAME=VALUE, as weights=weights.npy")
        found[name] = parse_argument(value, generator, "--set")
    return found
