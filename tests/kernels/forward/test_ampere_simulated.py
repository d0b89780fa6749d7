"""The real kernels on the simulated GPU: right, free of hazards, free of conflicts where they should be."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from samples import every_other

from flashwright import (
    DType,
    FlashForwardKernelConfig,
    get_autotuning_kernel_configs,
    get_kernel_progression_configs,
    parse_kernel_name_into_config,
    run_forward,
)
from flashwright.compiler.nvrtc import CompiledProgram, compile_source
from flashwright.kernels.forward.ampere import AMPERE_FORWARD
from flashwright.kernels.forward.ampere.shapes import ForwardKernelTileShapes
from flashwright.kernels.forward.ampere.source import forward_kernel_source
from flashwright.kernels.tensors import DeviceTensor
from flashwright.problem.reference import random_inputs, reference_forward, relative_error
from flashwright.runtime.simulated import SIMULATED_MULTIPROCESSORS, simulate_forward
from flashwright.simulator.errors import SimulationError
from flashwright.simulator.gpu import SimulatedGPU
from flashwright.simulator.run import Run

ROUNDING = {DType.FP16: 5e-4, DType.BF16: 4e-3}
"""Relative error that 16-bit inputs to the second product explain: about one unit in the last place."""

LADDER = [config for dtype in DType for d_head in (64, 128) for config in get_kernel_progression_configs(dtype, d_head)]
SPACE = list(dict.fromkeys([*get_autotuning_kernel_configs(), *LADDER]))
SAMPLE = [
    *SPACE[7::61],
    *map(
        parse_kernel_name_into_config,
        (
            "(FP16, 64, 64, 64, 4): load_0_0_0_tiles",
            "(BF16, 128, 128, 32, 8): eager+swizzled+load_4_4_2_tiles",
            "(BF16, 64, 64, 64, 4): async+swizzled+load_2_2_2_tiles+buffer+opt_softmax+streaming+stride_64",
            "(BF16, 64, 128, 64, 4): async+eager+swizzled+load_2_2_0_tiles+buffer+opt_softmax+mma_sum+lazy+keep_order",
        ),
    ),
]


def check_forward(config: FlashForwardKernelConfig) -> None:
    inputs = random_inputs(config, heads=1)
    # A kernel that returns the log-sum-exp does not add its rows on the tensor cores, so those are run without it.
    simulation = simulate_forward(config, *inputs, return_lse=not config.mma_row_sum)
    output, lse = reference_forward(*inputs)
    assert relative_error(simulation.output, output) < ROUNDING[config.dtype]
    if simulation.lse is not None:
        np.testing.assert_allclose(simulation.lse, lse, rtol=0, atol=2e-5)
    assert (simulation.run.counters.bank_conflicts == 0) == config.swizzled


@pytest.mark.parametrize("config", every_other(SAMPLE))
def test_kernels_agree_with_float64_without_hazards(config):
    check_forward(config)


@pytest.mark.slow
@pytest.mark.parametrize("config", SPACE, ids=str)
def test_every_kernel_of_the_space_and_the_ladder_agrees_with_float64_without_hazards(config):
    check_forward(config)


FINAL = get_kernel_progression_configs()[-1]


def test_tensors_may_have_any_strides():
    """A batch-major, a head-major and a padded tensor give the same result as contiguous ones."""
    q, k, v = (np.ascontiguousarray(x) for x in random_inputs(FINAL, batch=2, rows=128))
    expected = simulate_forward(FINAL, q, k, v).output
    rows_outermost = np.ascontiguousarray(q.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)
    padded = np.zeros((2, 2, 130, 144), k.dtype)
    padded[:, :, 1:129, 8:136] = k
    simulated = simulate_forward(FINAL, rows_outermost, padded[:, :, 1:129, 8:136], v[:, ::-1][:, ::-1])
    assert np.array_equal(simulated.output.view(np.uint16), expected.view(np.uint16))


def test_the_simulator_is_a_device_of_run_forward():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    config = replace(FINAL, d_head=64)
    out, lse = run_forward(config, q, k, v, scale=0.5, return_lse=True, device="simulator")
    expected, expected_lse = reference_forward(*(x.float().numpy() for x in (q, k, v)), scale=0.5)
    assert out.dtype == q.dtype and out.stride() == q.stride()
    assert relative_error(out.float().numpy(), expected) < ROUNDING[DType.BF16]
    np.testing.assert_allclose(lse.numpy(), expected_lse, atol=2e-5)


def test_traffic_is_what_the_tile_shapes_say():
    """Every element of Q and O moves once, of K and V once per block of query rows."""
    config = parse_kernel_name_into_config("(BF16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax")
    q, k, v = random_inputs(config, heads=2, rows=256)
    counters = simulate_forward(config, q, k, v).run.counters
    q_blocks = 256 // config.B_r
    assert counters.bytes_global_to_shared == q.nbytes + q_blocks * (k.nbytes + v.nbytes)
    assert counters.bytes_registers_to_global == q.nbytes
    assert counters.global_sectors == counters.global_sectors_ideal
    assert counters.tensor_flops == 4 * 2 * 256 * 256 * 128
    assert counters.max_async_groups_in_flight == 2
    shapes = ForwardKernelTileShapes(config)
    # Q's registers are filled behind one barrier; each KV step has two.
    assert counters.barriers == q_blocks * 2 * (1 + 2 * 256 // config.B_c)
    assert shapes.QK.A_load_entire_block_into_rf


# --- Mutations: a broken kernel is named for what is wrong with it ---------------------------------------------

MUTATED = parse_kernel_name_into_config("(BF16, 64, 64, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax")


def launch_program(program: CompiledProgram, ptx: str | None = None) -> tuple[Run, float]:
    """A program of the mutated config on random inputs: the run and its error. Of the four blocks of keys the last is
    incomplete, so that two steps are plain and two are not: both loops of the kernel go from one step to the next."""
    gpu = SimulatedGPU("sm_80")
    inputs = [np.ascontiguousarray(x) for x in random_inputs(MUTATED, heads=1, rows=250)]
    arrays = [*inputs, np.full_like(inputs[0], np.nan)]
    strides = tuple(stride // 2 for stride in inputs[0].strides)
    tensors = [DeviceTensor("qkvo"[i], gpu.to_device(a), MUTATED.dtype, a.shape, strides) for i, a in enumerate(arrays)]
    launch = AMPERE_FORWARD.launch(MUTATED, *tensors, multiprocessors=SIMULATED_MULTIPROCESSORS)
    shapes = ForwardKernelTileShapes(MUTATED)
    module = gpu.load(ptx or program.ptx)
    run = module.launch(
        program.name, launch.grid, (shapes.threads, 1, 1), shapes.shared_bytes, [bytes(launch.arguments)]
    )
    return run, relative_error(gpu.to_host(tensors[3].address), reference_forward(*inputs)[0])


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return compile_source(forward_kernel_source(MUTATED), "sm_80")


def test_the_kernel_is_sound_before_it_is_mutated(program):
    _, error = launch_program(program)
    assert error < ROUNDING[MUTATED.dtype]


def without_line(ptx: str, pattern: str, occurrence: int) -> str:
    lines = ptx.splitlines()
    found = [i for i, line in enumerate(lines) if re.search(pattern, line)]
    return "\n".join(lines[: found[occurrence]] + lines[found[occurrence] + 1 :])


def occurrences(ptx: str, pattern: str) -> int:
    return len(re.findall(pattern, ptx))


def expect_hazard(program: CompiledProgram, ptx: str, kinds: set[str]) -> SimulationError:
    with pytest.raises(SimulationError) as caught:
        launch_program(program, ptx)
    assert caught.value.kind in kinds
    assert caught.value.source_line is not None
    return caught.value


@pytest.mark.parametrize("occurrence", range(4))
def test_a_missing_wait_is_named(program, occurrence):
    """A step of each loop has two."""
    assert occurrences(program.ptx, r"cp\.async\.wait_group") == 4
    expect_hazard(program, without_line(program.ptx, r"cp\.async\.wait_group", occurrence), {"async-copy"})


@pytest.mark.parametrize("occurrence", range(4))
def test_a_missing_barrier_is_named(program, occurrence):
    """A step of each loop has two."""
    assert occurrences(program.ptx, r"bar\.sync|barrier\.sync") == 4
    mutant = without_line(program.ptx, r"bar\.sync|barrier\.sync", occurrence)
    error = expect_hazard(program, mutant, {"async-copy", "race"})
    assert error.other is not None and (error.other.warp, error.other.lane) != (error.warp, error.lane)


def test_a_missing_warp_barrier_before_the_store_of_O_is_named(program):
    assert occurrences(program.ptx, r"bar\.warp\.sync") == 1
    error = expect_hazard(program, without_line(program.ptx, r"bar\.warp\.sync", 0), {"race"})
    assert error.other is not None and error.other.warp == error.warp and error.other.lane != error.lane


@pytest.mark.parametrize(
    ("shift", "kinds"),
    [(8, {"misaligned"}), (1 << 20, {"out-of-bounds"})],
    ids=["by half a vector", "beyond the tensor"],
)
def test_a_shifted_global_pointer_is_named(program, shift, kinds):
    copy = re.search(r"cp\.async\.cg\.shared\.global \[(%r\d+)\], \[(%rd\d+)\], 16;", program.ptx)
    assert copy is not None
    shifted = copy[0].replace(f"[{copy[2]}]", f"[{copy[2]}+{shift}]")
    expect_hazard(program, program.ptx.replace(copy[0], shifted, 1), kinds)


def test_a_shifted_shared_pointer_is_named(program):
    """The last ldmatrix of V, moved by one block, reads beyond the launch's shared memory."""
    loads = re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16 \{.*\}, \[%r\d+\];", program.ptx)
    shifted = loads[-1].replace("];", f"+{64 * 64 * 2}];")
    expect_hazard(program, program.ptx.replace(loads[-1], shifted), {"out-of-bounds", "shared-size"})


def test_a_swizzle_on_one_side_only_is_caught_by_the_reference():
    """Writer and reader permute the same bytes differently: every access is legal, and only the result is wrong."""
    source = forward_kernel_source(MUTATED)
    headers = dict(source.headers)
    swizzled = "vector_offset<rows>(first_row + rest * rows_per_pass, first_vector(pass) + vector)"
    assert swizzled in headers["tile/copy.cuh"]
    headers["tile/copy.cuh"] = headers["tile/copy.cuh"].replace(
        swizzled, "((first_row + rest * rows_per_pass) * layout::row_bytes + vector * vector_bytes)"
    )
    mutant = compile_source(replace(source, headers=tuple(headers.items())), "sm_80")
    run, error = launch_program(mutant)
    assert run.counters.bank_conflicts == 0
    assert error > 0.1
