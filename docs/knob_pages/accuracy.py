"""Errors against float64: what is allowed where, what the simulator computes, what was measured on a GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from flashwright.kernels.registry import families, family_of, parse_config
from flashwright.problem.dtypes import NUMPY_DTYPES, DType
from flashwright.problem.reference import TOLERANCE, reference_forward, relative_error
from flashwright.runtime.progress import progress_bar
from flashwright.runtime.simulated import simulate_forward
from flashwright.workbench.bench.error_ratios import LARGEST_LIMIT, NORMAL_RMS_LIMIT, RMS_LIMIT
from flashwright.workbench.bench.knob_effects import KnobEffects
from flashwright.workbench.bench.result_files import parsed_entries, read_document, write_document
from flashwright.workbench.bench.results import BenchResult, label_of
from flashwright.workbench.bench.scores import KINDS, score_inputs

from .blocks import Renderer
from .kernel_facts import installed_nvrtc
from .markdown import table

D_HEAD, HEADS, ROWS, KEYS = 64, 2, 256, 512
_ORDER = (DType.BF16, DType.FP16)


@dataclass(frozen=True)
class SimulatedError:
    """Of a family's kernel on one kind of scores: ‖out − float64‖ / ‖float64‖."""

    config: str
    scores: str
    error: float
    rounding: float
    """That of the float64 result, rounded to the dtype."""


@dataclass(frozen=True)
class SimulatedErrors:
    nvrtc: str
    errors: tuple[SimulatedError, ...]


def simulate_errors(*, progress: bool = True) -> SimulatedErrors:
    """The last rung of every family's ladder, in both dtypes, on every kind of scores."""
    configs = [
        family.ladder.rungs(dtype, D_HEAD)[-1].config for family in families() if family.ladder for dtype in DType
    ]
    found = []
    with progress_bar("errors", len(configs) * len(KINDS), enabled=progress) as advance:
        for config in configs:
            for kind in KINDS:
                found.append(_simulated_error(config, kind))
                advance()
    return SimulatedErrors(installed_nvrtc(), tuple(found))


def _simulated_error(config: object, kind: str) -> SimulatedError:
    import torch

    dtype = config.dtype  # type: ignore[attr-defined]
    inputs = score_inputs(
        kind, batch=1, heads=HEADS, q_length=ROWS, kv_length=KEYS, d_head=D_HEAD,
        dtype={DType.FP16: torch.float16, DType.BF16: torch.bfloat16}[dtype],
    )  # fmt: skip
    arrays = [x.float().numpy().astype(NUMPY_DTYPES[dtype]) for x in inputs]
    expected, _ = reference_forward(*arrays)
    out = simulate_forward(config, *arrays, check_hazards=False).output  # type: ignore[arg-type]
    rounded = expected.astype(np.float32).astype(NUMPY_DTYPES[dtype])
    return SimulatedError(str(config), kind, relative_error(out, expected), relative_error(rounded, expected))


def write_errors(path: Path, found: SimulatedErrors) -> None:
    write_document(path, {"nvrtc": found.nvrtc, "errors": [asdict(error) for error in found.errors]})


def read_errors(path: Path) -> SimulatedErrors:
    document = read_document(path, holding="errors", made_by="make docs")
    errors = parsed_entries(path, document, "errors", lambda values: SimulatedError(**values))
    return SimulatedErrors(document["nvrtc"], tuple(errors))


# --- Tables ----------------------------------------------------------------------------------------------------------


def tolerances() -> str:
    allowed = {
        "`flashwright tune` times a config, `flashwright ladder` accepts a rung": [
            f"{TOLERANCE[d]:.0e}" for d in _ORDER
        ],
        "`benchmarks/accuracy.py`: the largest error, × eager attention's": [f"{LARGEST_LIMIT:g}"] * 2,
        "the root mean square, × FlashAttention-2's": [f"{RMS_LIMIT:g}"] * 2,
        "the same on normal scores": [f"{NORMAL_RMS_LIMIT:g}"] * 2,
    }
    return table(
        ["where", *(dtype.name for dtype in _ORDER)], [[where, *limits] for where, limits in allowed.items()], 1
    )


def simulated_errors_table(found: SimulatedErrors) -> str:
    """Per kind of scores; a column per family and dtype."""
    configs = list(dict.fromkeys(error.config for error in found.errors))
    by_place = {(error.config, error.scores): error for error in found.errors}
    header = ["kind of scores"]
    for text in configs:
        config = parse_config(text)
        header.append(f"{family_of(config).title}, {config.dtype.name}")
    rows = []
    for kind in dict.fromkeys(error.scores for error in found.errors):
        rows.append([f"`{kind}`", *(_error_cell(by_place[text, kind]) for text in configs)])
    kernels = "; ".join(f"`{text}`" for text in configs)
    note = (
        f"Relative errors against float64, in brackets × that of rounding the float64 result. {HEADS} heads, {ROWS} "
        f"rows, {KEYS} keys of {D_HEAD} columns on the simulated GPU, NVRTC {found.nvrtc}: {kernels}."
    )
    return f"{table(header, rows, 1)}\n\n{note}"


def _error_cell(error: SimulatedError) -> str:
    times = f" ({error.error / error.rounding:.2f})" if error.rounding else ""
    return f"{error.error:.1e}{times}"


def measured_errors_table(bench: BenchResult) -> str:
    """The largest error over all lengths, of `attention()` and its peers."""
    names = list(dict.fromkeys(name for cell in bench.cells for name in cell.measurements))
    largest: dict[tuple[int, bool], dict[str, float]] = {}
    for result in bench.cells:
        of_problem = largest.setdefault((result.cell.d_head, result.cell.causal), {})
        for name, measurement in result.measurements.items():
            of_problem[name] = max(of_problem.get(name, 0.0), measurement.relative_error)
    rows = []
    for (d_head, causal), errors in sorted(largest.items()):
        cells = [f"{errors[name]:.2e}" if name in errors else "–" for name in names]
        rows.append([str(d_head), "causal" if causal else "full", *cells])
    gpu, date = bench.environment.get("gpu"), str(bench.environment.get("date"))[:10]
    note = f"BF16, standard normal q, k and v, the largest of all lengths; {gpu}, {date}."
    return f"{table(['d_head', 'mask', *map(label_of, names)], rows, 2)}\n\n{note}"


def measured_knob_errors(effects: KnobEffects | None) -> str:
    """The largest error of any Ampere kernel that the pages of the knobs time, by dtype."""
    if effects is None:
        return "Not measured yet."
    largest: dict[tuple[str, int], tuple[int, float]] = {}
    for result in effects.cells:
        errors = [m.relative_error for name, m in result.measurements.items() if name.startswith("(")]
        key = (result.cell.dtype.name, result.cell.d_head)
        kernels, worst = largest.get(key, (0, 0.0))
        largest[key] = (max(kernels, len(errors)), max([worst, *errors]))
    rows = [[dtype, str(d_head), str(n), f"{worst:.2e}"] for (dtype, d_head), (n, worst) in sorted(largest.items())]
    return table(["dtype", "d_head", "kernels", "largest relative error"], rows, 1)


def accuracy_renderers(errors: SimulatedErrors, bench: BenchResult, effects: KnobEffects | None) -> dict[str, Renderer]:
    return {
        "tolerances": lambda _: tolerances(),
        "simulated-errors": lambda _: simulated_errors_table(errors),
        "measured-errors": lambda _: measured_errors_table(bench),
        "measured-knob-errors": lambda _: measured_knob_errors(effects),
    }
