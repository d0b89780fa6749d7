"""PTX of nvcc and Triton, kept as text."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from .tools import launch

DATA = Path(__file__).parent / "data"


def test_nvcc_kernel() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 500)).astype(np.float32)
    outputs = {"y": y.copy()}
    launch((DATA / "nvcc_saxpy.ptx").read_text(), 64, outputs, x, np.float32(1.5), np.int32(500), grid=3)
    np.testing.assert_allclose(outputs["y"], 1.5 * x + y / 3, atol=1e-6)


def test_triton_softmax() -> None:
    x = np.random.default_rng(1).standard_normal((5, 200)).astype(np.float32)
    outputs = {"out": np.zeros_like(x)}
    gpu_arguments = (np.int32(200), 0, 0)  # Triton adds two scratch pointers
    ptx = (DATA / "triton_softmax.ptx").read_text()
    ptx = ptx.replace("softmax_kernel_param_0]", "swap]").replace("softmax_kernel_param_1]", "softmax_kernel_param_0]")
    ptx = ptx.replace("swap]", "softmax_kernel_param_1]")  # our helper passes outputs first
    launch(ptx, 128, outputs, x, *gpu_arguments, grid=5, shared_bytes=16)
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(outputs["out"], exponentials / exponentials.sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("check_hazards", [True, False])
def test_triton_pipelined_matmul_is_free_of_hazards_and_conflicts(check_hazards: bool) -> None:
    from flashwright.simulator.gpu import SimulatedGPU

    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((128, 128), (128, 64)))
    gpu = SimulatedGPU()
    module = gpu.load((DATA / "triton_matmul.ptx").read_text())
    out = gpu.to_device(np.zeros((128, 64), np.float32))
    run = module.launch(
        "matmul_kernel", 2, 128, 16384, [gpu.to_device(a), gpu.to_device(b), out, np.int32(128), 0, 0],
        check_hazards=check_hazards,
    )  # fmt: skip
    np.testing.assert_allclose(gpu.to_host(out), a.astype(np.float32) @ b.astype(np.float32), atol=1e-4)
    assert run.counters.bank_conflicts == 0
    assert run.counters.tensor_flops == 2 * 128 * 128 * 64
