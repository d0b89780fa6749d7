"""The kernel that merges partial results, on the simulator."""

import numpy as np
import pytest

import flashwright as fw
from flashwright.compiler.nvrtc import compile_source
from flashwright.distributed.merge_kernel import THREADS, merge_grid, merge_source
from flashwright.problem.dtypes import NUMPY_DTYPES, DType


@pytest.mark.parametrize(("dtype", "columns"), [(DType.BF16, 64), (DType.FP16, 96)])
def test_a_part_is_mixed_into_the_sums_by_its_weight(dtype, columns):
    generator = np.random.default_rng(0)
    batch, heads, rows = 2, 3, 37
    sums = generator.standard_normal((batch, heads, rows, columns)).astype(np.float32)
    part = generator.standard_normal((batch, heads, rows, columns)).astype(NUMPY_DTYPES[dtype])
    lse, part_lse = (8 * generator.standard_normal((batch, heads, rows)).astype(np.float32) for _ in range(2))
    lse[:, :, ::5] = -np.inf  # rows without a key before
    part_lse[:, :, ::3] = -np.inf  # and without one in the part
    sums[lse == -np.inf] = 0
    part[part_lse == -np.inf] = 0

    program = compile_source(merge_source(dtype), "sm_80")
    elements = (heads * rows * columns, rows * columns, columns)
    bits = part.view(np.uint16)
    arguments = [sums, *elements, lse, heads * rows, rows, bits, *elements, part_lse, rows, columns]
    simulated = fw.simulate_kernel(
        program.ptx, kernel=program.name, grid=merge_grid(batch, heads, rows, columns), block=(THREADS, 1, 1),
        args=arguments,
    )  # fmt: skip
    with np.errstate(divide="ignore", invalid="ignore"):
        expected_lse = np.logaddexp(lse.astype(np.float64), part_lse)
        weights = [np.nan_to_num(np.exp(x - expected_lse), nan=0.0)[..., None] for x in (lse, part_lse)]
    expected = weights[0] * sums + weights[1] * part.astype(np.float64)
    np.testing.assert_allclose(simulated.args[4], expected_lse, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(simulated.args[0], expected, rtol=2e-5, atol=2e-6)
