"""The simulator against a real GPU: counters of Nsight Compute and results, both kept in `data/`."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from flashwright import parse_kernel_name_into_config
from flashwright.compiler.nvrtc import compile_source
from flashwright.kernels.source import KernelSource
from flashwright.problem.reference import random_inputs, relative_error
from flashwright.runtime.simulated import simulate_forward
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

from .cases import (
    ARITHMETIC_CASES,
    DATA,
    ELEMENTS,
    FORWARD_CONFIGS,
    FORWARD_HEADS,
    FORWARD_ROWS,
    MMA_REPEATS,
    SMALL_KERNELS,
    ArithmeticCase,
)
from .inputs import arithmetic_input, small_kernel_input

MEASURED = json.loads((DATA / "counters.json").read_text())["cases"]
RESULTS = np.load(DATA / "results.npz")

# A cp.async request whose global addresses or shared banks are scattered is split by the hardware: it is replayed
# once per 32-byte sector or bank conflict, and counts its wavefronts and sectors again each time. The simulator
# counts what the addresses alone ask for. Values: (wavefronts, sectors) of the copy that the hardware adds.
SPLIT_COPIES = {"cp_async_conflict_8": (0, 16), "cp_async_uncoalesced": (28, 0)}


def launch_small(source: KernelSource, values: np.ndarray, outputs: int) -> tuple[Run, np.ndarray]:
    program = compile_source(source, "sm_90")
    gpu = SimulatedGPU("sm_90")
    out = gpu.to_device(np.full(outputs, np.nan, np.float32))
    run = gpu.load(program.ptx).launch(program.name, (1, 1, 1), (32, 1, 1), 0, [gpu.to_device(values), out])
    return run, gpu.to_host(out)


@pytest.fixture(scope="module")
def simulations() -> dict:
    """Each forward kernel, simulated as compiled for the GPU that was measured."""
    found = {}
    for name, text in FORWARD_CONFIGS.items():
        config = parse_kernel_name_into_config(text)
        inputs = random_inputs(config, heads=FORWARD_HEADS, rows=FORWARD_ROWS)
        found[name] = simulate_forward(config, *inputs, arch="sm_90")
    return found


def check_counters(run: Run, name: str) -> None:
    measured, counted = MEASURED[name], run.counters
    extra_wavefronts, extra_sectors = SPLIT_COPIES.get(name, (0, 0))
    wavefronts = sum(measured[f"{kind}_wavefronts"] for kind in ("shared_load", "shared_store", "copy"))
    assert counted.shared_wavefronts == wavefronts - extra_wavefronts
    sectors = measured["global_load_sectors"] + measured["global_store_sectors"]
    assert counted.global_sectors == sectors - extra_sectors
    # The hardware has no counter of the conflicts of copies: they are their wavefronts above four a request.
    conflicts = measured["shared_load_conflicts"] + measured["shared_store_conflicts"]
    conflicts += measured["copy_wavefronts"] - extra_wavefronts - 4 * measured["copy_instructions"]
    assert counted.bank_conflicts == conflicts
    ldmatrix = sum(count for opcode, count in counted.instructions.items() if opcode.startswith("ldmatrix"))
    assert ldmatrix == measured["ldmatrix_instructions"]


@pytest.mark.parametrize("name", FORWARD_CONFIGS)
def test_forward_kernels_have_the_wavefronts_conflicts_and_sectors_of_the_hardware(name, simulations):
    check_counters(simulations[name].run, name)


@pytest.mark.parametrize("name", SMALL_KERNELS)
def test_small_kernels_have_the_wavefronts_conflicts_and_sectors_of_the_hardware(name):
    run, _ = launch_small(SMALL_KERNELS[name], small_kernel_input(), ELEMENTS)
    check_counters(run, name)


@pytest.mark.parametrize("name", FORWARD_CONFIGS)
def test_forward_kernels_compute_what_the_hardware_computes(name, simulations):
    output = simulations[name].output[:, :, :16].astype(np.float64)
    assert relative_error(output, RESULTS[name].astype(np.float64)) < 1e-4
    assert np.mean(output == RESULTS[name]) > 0.98


@pytest.mark.parametrize("case", [c for c in ARITHMETIC_CASES if c.inputs == "mma"], ids=lambda c: c.name)
def test_mma_differs_from_the_hardware_by_less_than_the_stated_bound(case: ArithmeticCase):
    """The simulator rounds the exact sum once; tensor cores cut addends off below the largest one's last bits."""
    _, output = launch_small(case.source, arithmetic_input(case), MMA_REPEATS * 128)
    difference = np.abs(output.astype(np.float64) - RESULTS[case.name])
    assert np.all(difference <= 2.0**-21 * largest_addend(case))


def largest_addend(case: ArithmeticCase) -> np.ndarray:
    """Per output element, the largest magnitude among its sixteen products and the accumulator."""
    dtype = np.dtype(np.float16 if case.name == "mma_f16" else ml_dtypes.bfloat16)
    words = arithmetic_input(case).reshape(MMA_REPEATS, 32, 10)
    pairs = np.ascontiguousarray(words[..., :6]).view(np.uint16).view(dtype).astype(np.float64)
    pairs = np.abs(pairs.reshape(MMA_REPEATS, 8, 4, 6, 2))  # repeat, row group, quad lane, register, half
    a = np.zeros((MMA_REPEATS, 16, 16))
    b = np.zeros((MMA_REPEATS, 16, 8))
    for quad in range(4):
        for half in range(2):
            k = 2 * quad + half
            a[:, :8, k], a[:, 8:, k] = pairs[:, :, quad, 0, half], pairs[:, :, quad, 1, half]
            a[:, :8, k + 8], a[:, 8:, k + 8] = pairs[:, :, quad, 2, half], pairs[:, :, quad, 3, half]
            b[:, k, :], b[:, k + 8, :] = pairs[:, :, quad, 4, half], pairs[:, :, quad, 5, half]
    products = (a[:, :, :, None] * b[:, None, :, :]).max(axis=2)  # repeat, row, column
    c = np.abs(np.ascontiguousarray(words[..., 6:]).view(np.float32).astype(np.float64))
    largest = np.empty((MMA_REPEATS, 8, 4, 4))
    for register in range(4):
        rows = slice(0, 8) if register < 2 else slice(8, 16)
        largest[..., register] = products[:, rows, register % 2 :: 2]
    return np.maximum(largest.reshape(MMA_REPEATS, 32, 4), c).reshape(-1)


# How far an approximation may be from the hardware's: relative, or absolute where it crosses zero.
APPROXIMATION_BOUNDS = {
    "ex2_approx_ftz_f32": {"rtol": 2**-22},
    "lg2_approx_ftz_f32": {"rtol": 2**-22, "atol": 2**-22},
    "rcp_approx_ftz_f32": {"rtol": 2**-23},
    "rsqrt_approx_ftz_f32": {"rtol": 2**-22},
    "sqrt_approx_ftz_f32": {"rtol": 2**-22},
    "sin_approx_ftz_f32": {"atol": 2**-20, "within": 3.1416},
    "cos_approx_ftz_f32": {"atol": 2**-20, "within": 3.1416},
    "tanh_approx_f32": {"rtol": 2**-10.9},
}


@pytest.mark.parametrize("case", [c for c in ARITHMETIC_CASES if c.inputs == "floats"], ids=lambda c: c.name)
def test_approximations_are_within_the_stated_bound_of_the_hardware(case: ArithmeticCase):
    bound = dict(APPROXIMATION_BOUNDS[case.name])
    arguments = arithmetic_input(case).view(np.float32)
    compared = np.abs(arguments) <= bound.pop("within", np.inf)
    _, output = launch_small(case.source, arithmetic_input(case), 4096)
    np.testing.assert_allclose(
        output[compared], RESULTS[case.name][compared], rtol=bound.get("rtol", 0), atol=bound.get("atol", 0)
    )
