"""`flashwright simulate`: a config on random inputs, or any CUDA or PTX file with arguments written as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from flashwright.cli.attention_options import (
    CausalOption,
    KeysOption,
    KvHeadsOption,
    SoftcapOption,
    WindowOption,
    attention_options,
)
from flashwright.cli.kernel_options import (
    LAUNCH_PANEL,
    LAUNCH_PARAMETERS,
    ArgOption,
    BlockOption,
    ClusterOption,
    CompilerOption,
    DefineOption,
    GridOption,
    HazardsOption,
    IncludeOption,
    KernelOption,
    SeedOption,
    SetOption,
    SharedBytesOption,
    SpuriousWaitsOption,
    StepLimitOption,
    given_options,
    hazard_checks,
    launch_arguments,
)
from flashwright.cli.output import ROWS, JsonOption, print_json
from flashwright.cli.progress import simulating
from flashwright.kernels.family import OLDEST
from flashwright.kernels.registry import parse_config, tile_shapes
from flashwright.problem.lengths import MAX_LENGTH
from flashwright.simulation import KernelSimulation, simulate_kernel
from flashwright.simulation.config import SimulatedConfig, simulate_config
from flashwright.simulation.source import CUDA_SUFFIXES, PTX_SUFFIX

# Parameters that say something about one kind of target only.
_OF_CUDA = {"include", "define", "nvrtc"}
_OF_KERNELS = {*LAUNCH_PARAMETERS, "spurious_waits", "save", *_OF_CUDA}
_OF_CONFIGS = {"rows", "keys", "heads", "kv_heads", "causal", "window", "softcap"}


def simulate(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(help="A CUDA or PTX file, or a config's short form.", metavar="FILE.cu|FILE.ptx|CONFIG"),
    ],
    kernel: KernelOption = None,
    grid: GridOption = "1",
    block: BlockOption = "32",
    cluster: ClusterOption = None,
    shared_bytes: SharedBytesOption = 0,
    spurious_waits: SpuriousWaitsOption = False,
    arg: ArgOption = None,
    set_: SetOption = None,
    seed: SeedOption = 0,
    save: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N=FILE.npy",
            help="Write what the kernel left in argument N (from 0) to a file.",
            rich_help_panel=LAUNCH_PANEL,
        ),
    ] = None,
    include: IncludeOption = None,
    define: DefineOption = None,
    nvrtc: CompilerOption = None,
    rows: Annotated[
        int, typer.Option(*ROWS, help="CONFIG: rows of q, and of k and v unless --keys says otherwise.")
    ] = 256,
    keys: KeysOption = None,
    heads: Annotated[int, typer.Option(help="CONFIG: heads of q.")] = 2,
    kv_heads: KvHeadsOption = None,
    causal: CausalOption = False,
    window: WindowOption = None,
    softcap: SoftcapOption = 0.0,
    arch: Annotated[
        str | None,
        typer.Option(
            help="The simulated architecture.",
            show_default="the oldest of the config's family; of PTX its target; of CUDA sm_80",
        ),
    ] = None,
    hazards: HazardsOption = None,
    no_hazards: Annotated[bool, typer.Option("--no-hazards", help="The same as --hazards ignore.")] = False,
    step_limit: StepLimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a kernel on the simulated GPU and print what it did.

    FILE.cu is compiled by NVRTC, and its counters stand beside its lines. CONFIG runs on random q, k and v, and is
    compared with float64.
    """
    _refuse_options_of_other_targets(ctx, target)
    if no_hazards and hazards is not None:
        raise ValueError(f"--no-hazards: not together with --hazards {hazards}")
    checks = hazard_checks("ignore") if no_hazards else True if hazards is None else hazard_checks(hazards)
    result: SimulatedConfig | SimulatedFile
    if target.endswith((*CUDA_SUFFIXES, PTX_SUFFIX)):
        launch = launch_arguments(
            kernel=kernel, grid=grid, block=block, cluster=cluster, shared_bytes=shared_bytes,
            spurious_waits=spurious_waits, arg=arg, set_=set_, seed=seed, include=include, define=define, nvrtc=nvrtc,
            arch=arch, step_limit=step_limit,
        )  # fmt: skip
        places = _places(save or [], len(launch["args"]))
        with simulating(keep_stdout=as_json) as progress:
            simulation = simulate_kernel(Path(target), **launch, check_hazards=checks, progress=progress)
        for index, path in places.items():
            np.save(path, simulation.args[index])
        result = SimulatedFile(simulation, places)
    else:
        for name, value in (("rows", rows), ("heads", heads)):
            if not 1 <= value <= MAX_LENGTH:
                raise ValueError(f"--{name}: {value} {name} are not allowed; allowed: 1 to {MAX_LENGTH}")
        config = parse_config(target)
        tile_shapes(config)
        options = attention_options(causal, window, softcap)
        limits = {} if step_limit is None else {"step_limit": step_limit}
        with simulating(keep_stdout=as_json) as progress:
            result = simulate_config(
                config, rows=rows, keys=keys, heads=heads, kv_heads=kv_heads, options=options, arch=arch or OLDEST,
                check_hazards=checks, progress=progress, **limits,
            )  # fmt: skip
    if as_json:
        print_json(result.to_dict(), "simulate")
    else:
        print(result.report())


@dataclass(frozen=True)
class SimulatedFile:
    """A user's kernel, and where its outputs were saved."""

    simulation: KernelSimulation
    saved: Mapping[int, Path]

    def to_dict(self) -> dict[str, Any]:
        return {**self.simulation.run.to_dict(), "saved": {str(n): str(path) for n, path in self.saved.items()}}

    def report(self) -> str:
        saved = [f"argument {index} was saved to {path}" for index, path in self.saved.items()]
        return "\n".join([self.simulation.report(), *saved])


def _refuse_options_of_other_targets(ctx: typer.Context, target: str) -> None:
    """An option that would be ignored is an error."""
    if target.endswith(CUDA_SUFFIXES):
        kind, foreign = "a CUDA file", _OF_CONFIGS
    elif target.endswith(PTX_SUFFIX):
        kind, foreign = "a PTX file", _OF_CONFIGS | _OF_CUDA
    else:
        kind, foreign = "a config", _OF_KERNELS
    given = [option for name, option in given_options(ctx).items() if name in foreign]
    if given:
        raise ValueError(f"{', '.join(given)}: not for {kind}; `flashwright simulate --help` says what each is for")


def _places(texts: Sequence[str], arguments: int) -> dict[int, Path]:
    """Argument number → file; ValueError for what cannot be saved there, before the work."""
    places = {}
    for text in texts:
        number, _, name = text.partition("=")
        path = Path(name)
        if not number.isdigit() or path.suffix != ".npy":
            raise ValueError(f"--save: {text!r} is not allowed; expected N=FILE.npy")
        if int(number) >= arguments:
            raise ValueError(f"--save: there is no argument {number}; arguments are numbered from 0 to {arguments - 1}")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--save: there is no directory {path.parent} to write {path.name} to")
        places[int(number)] = path
    return places
