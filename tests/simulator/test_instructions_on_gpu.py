"""The simulator and a Hopper GPU agree on instructions whose results are exact."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.hardware.tensor_map import Swizzle
from flashwright.simulator import SimulatedGPU

from .instruction_cases import CASES
from .mma_tools import FORMS as MMA_FORMS
from .mma_tools import Mma
from .test_hopper_on_gpu import RealGPU
from .test_reductions import BULK, DTYPES, VECTORS, run_bulk, run_vectors
from .test_wgmma_types import FORMS as WGMMA_FORMS
from .test_wgmma_types import Wgmma
from .tools import THREADS, apply_on, instruction_ptx

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("body", "result", "types", "columns"), CASES, ids=[f"{number}-{case[0]}" for number, case in enumerate(CASES)]
)
def test_results_are_equal(body: str, result: str, types: tuple[str, ...], columns: list[list[object]]) -> None:
    ptx = instruction_ptx(body, result, types)
    gpus = RealGPU(), SimulatedGPU("sm_90")
    modules = [gpu.load(ptx) for gpu in gpus]
    for start in range(0, len(columns[0]), THREADS):
        operands = [(name, column[start : start + THREADS]) for name, column in zip(types, columns, strict=True)]
        real, simulated = (
            apply_on(gpu, module, result, *operands)[0] for gpu, module in zip(gpus, modules, strict=True)
        )
        if DTYPES.get(result, np.dtype(np.uint32)).kind not in "fV":
            assert real.tolist() == simulated.tolist(), operands
            continue
        real, simulated = (values.astype(np.float64) for values in (real, simulated))
        for index in np.flatnonzero((real != simulated) | (np.signbit(real) != np.signbit(simulated))):
            both_nan = np.isnan(real[index]) and np.isnan(simulated[index])
            assert both_nan, ([column[index] for _, column in operands], real[index], simulated[index])


@pytest.mark.parametrize("form", MMA_FORMS, ids=lambda form: form.opcode)
def test_mma_agrees(form: Mma) -> None:
    a, b, c = form.operands()
    np.testing.assert_array_equal(form.run(a, b, c, RealGPU()), form.run(a, b, c))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [form for form in MMA_FORMS if form.a_type == "f64"], ids=lambda form: form.opcode)
def test_mma_of_doubles_rounds_alike(form: Mma) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape) for shape in ((form.rows, form.depth), (form.depth, 8), (form.rows, 8)))
    np.testing.assert_array_equal(form.run(a, b, c, RealGPU()), form.run(a, b, c))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", WGMMA_FORMS, ids=lambda form: form.opcode)
@pytest.mark.parametrize("a_in_registers", [False, True])
def test_wgmma_agrees(form: Wgmma, a_in_registers: bool) -> None:
    a, b, c = form.operands()
    real = form.run(a, b, c, a_in_registers, RealGPU())  # type: ignore[arg-type]
    np.testing.assert_array_equal(real, form.run(a, b, c, a_in_registers))


def whole_numbers(name: str, *shape: int) -> np.ndarray:
    """Their sums are exact in every order."""
    return np.random.default_rng(1).integers(0, 9, shape).astype(DTYPES[name])


@pytest.mark.parametrize(("suffix", "name", "columns", "count"), VECTORS)
def test_vector_reductions_agree(suffix: str, name: str, columns: int, count: int) -> None:
    old, values = whole_numbers(name, 8, columns), whole_numbers(name, 32, columns)
    instruction = f"red.global.{suffix} [%out], VALUES;"
    real, simulated = (run_vectors(instruction, old, values, count, gpu)[0] for gpu in (RealGPU(), None))
    assert real.tobytes() == simulated.tobytes()


def test_subnormal_sums_agree() -> None:
    tiny = np.full((8, 2), 1e-40, np.float32)
    for suffix in ("v2.f32 [%out], VALUES", "f32 [%out], %v0"):
        instruction = f"red.global.add.{suffix};"
        real, simulated = (
            run_vectors(instruction, tiny, np.repeat(tiny, 4, 0), 2, gpu)[0] for gpu in (RealGPU(), None)
        )
        assert real.tobytes() == simulated.tobytes()
    copy = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%out], [%s], 512;"
    flat = np.full(128, 1e-40, np.float32)
    real, simulated = (run_bulk(copy, flat, flat, gpu=gpu) for gpu in (RealGPU(), None))
    assert real.tobytes() == simulated.tobytes()
    box = flat.reshape(4, 32)
    copy = """mov.b32 %v0, 0;
              cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%map, {%v0, %v0}], [%s];"""
    real, simulated = (run_bulk(copy, box, box, box=(32, 4), gpu=gpu) for gpu in (RealGPU(), None))
    assert real.tobytes() == simulated.tobytes()


@pytest.mark.parametrize(("operation", "name"), BULK)
def test_reducing_copies_agree(operation: str, name: str) -> None:
    count = 1024 // DTYPES[name].itemsize
    old, values = whole_numbers(name, count), whole_numbers(name, count)[::-1].copy()
    copy = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{name} [%out], [%s], 1024;"
    real, simulated = (run_bulk(copy, old, values, gpu=gpu) for gpu in (RealGPU(), None))
    assert real.tobytes() == simulated.tobytes()


@pytest.mark.parametrize("name", ["f32", "bf16", "s32"])
def test_reducing_tensor_copies_agree(name: str) -> None:
    columns = 128 // DTYPES[name].itemsize
    old, values = whole_numbers(name, 24, columns), whole_numbers(name, 16, columns)
    copy = """mov.b32 %v0, 0; mov.b32 %v1, 16;
              cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%map, {%v0, %v1}], [%s];"""
    options = {"box": (columns, 16), "swizzle": Swizzle.B128}
    real, simulated = (run_bulk(copy, old, values, gpu=gpu, **options) for gpu in (RealGPU(), None))
    assert real.tobytes() == simulated.tobytes()
