"""The forward kernels on a GPU: right within rounding, on any layout and stream, with clear errors.

"Right" is measured against float64 on the same inputs, and against what PyTorch's own FlashAttention achieves there.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attention_cases import relative_error
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashwright import (
    DType,
    GPUError,
    get_autotuning_kernel_configs,
    get_hopper_configs,
    get_hopper_progression_configs,
    get_kernel_progression_configs,
    parse_hopper_config,
    parse_kernel_name_into_config,
    run_forward,
)
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.hopper.config import D_HEADS as HOPPER_D_HEADS
from flashwright.kernels.registry import family_of
from flashwright.problem.options import AttentionOptions

from .tools import TORCH_DTYPES, assert_same_bits, compile_with_and_without_lse, truth

BATCH, HEADS, LENGTH = 2, 4, 512
INCOMPLETE = (437, 333)
"""Rows and keys that no tile divides."""
ERROR_BOUND_OVER_PYTORCH = 1.2
LSE_TOLERANCE = 1e-3
SAMPLE_OF_AMPERE, SAMPLE_OF_HOPPER = 60, 30


def ladders(dtype: DType) -> list[KernelConfig]:
    configs: list[KernelConfig] = []
    for d_head in (64, 128):
        configs += get_kernel_progression_configs(dtype, d_head)
    for d_head in HOPPER_D_HEADS:
        configs += get_hopper_progression_configs(dtype, d_head)
    return configs


def spaces() -> list[list[KernelConfig]]:
    """Kernels of the two dtypes differ in names of instructions only: of each Ampere config, one or the other in turns;
    of Hopper, one."""
    ampere = [config for config in get_autotuning_kernel_configs() if config.dtype is DType.BF16]
    in_turns = [replace(config, dtype=DType.FP16) if i % 2 else config for i, config in enumerate(ampere)]
    return [in_turns, [*get_hopper_configs("BF16")]]


def sums_by_products(config: KernelConfig) -> bool:
    return getattr(config, "mma_row_sum", False)


def every_config() -> list[Any]:
    """The spaces and the ladders of all families, each config once, and whether its kernel without the log-sum-exp is
    run, too. By default a sample of the spaces, and ladders of BF16, with both kernels; all others where time does not
    matter. Of these, kernels that sum rows by products do so only without the log-sum-exp; in the others it is a store
    more, and the kernel that has it is enough."""
    draw = random.Random(12)
    samples = [draw.sample(space, n) for space, n in zip(spaces(), (SAMPLE_OF_AMPERE, SAMPLE_OF_HOPPER), strict=True)]
    by_default = dict.fromkeys(ladders(DType.BF16) + samples[0] + samples[1])
    others = dict.fromkeys(ladders(DType.FP16) + [config for space in spaces() for config in space])
    slow = [config for config in others if config not in by_default]
    return [
        *(pytest.param(config, True, id=str(config)) for config in by_default),
        *(pytest.param(config, sums_by_products(config), id=str(config), marks=pytest.mark.slow) for config in slow),
    ]


TUNED = parse_kernel_name_into_config(
    "(BF16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+buffer+opt_softmax+mma_sum"
)
PLAIN = parse_kernel_name_into_config("(FP16, 64, 64, 64, 4): load_0_0_0_tiles")
HOPPER = parse_hopper_config("hopper (BF16, 128, 128, 128): stages_2+overlap+ping_pong+persistent+lazy")


def skip_unless_it_runs(config: KernelConfig, arch: str) -> KernelConfig:
    family = family_of(config)
    if not family.runs_on(arch):
        pytest.skip(f"the {family.name} family does not run on {arch}")
    return config


@pytest.fixture(params=[TUNED, PLAIN, HOPPER], ids=str)
def config(request, arch) -> KernelConfig:
    """One of each kind that this GPU runs."""
    return skip_unless_it_runs(request.param, arch)


@dataclass(frozen=True)
class Problem:
    """Random inputs and what attention of them is."""

    q: Any
    k: Any
    v: Any
    reference: Any
    """float64"""
    lse: Any
    """float64"""
    pytorch_error: float
    """Relative error of PyTorch's FlashAttention."""


@cache
def problem(dtype: DType, d_head: int, q_length: int = LENGTH, kv_length: int = LENGTH) -> Problem:
    element = TORCH_DTYPES[dtype]
    generator = torch.Generator(device="cuda").manual_seed(d_head + q_length + kv_length)

    def random(length: int) -> Any:
        return torch.randn(BATCH, HEADS, length, d_head, generator=generator, device="cuda").to(element)

    q, k, v = random(q_length), random(kv_length), random(kv_length)
    reference, lse = truth(q, k, v, {})
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        pytorch = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    return Problem(q, k, v, reference, lse, relative_error(pytorch, reference))


def poisoned(like: Any) -> Any:
    return torch.full_like(like, math.nan)


def assert_right(o: Any, case: Problem) -> None:
    error = relative_error(o, case.reference)  # NaN, if an element is
    allowed = ERROR_BOUND_OVER_PYTORCH * case.pytorch_error
    unwritten = f"{o.isnan().sum().item()} of {o.numel()} elements were not written" if math.isnan(error) else ""
    assert error <= allowed, unwritten or f"{error:.2e}; allowed: {allowed:.2e}"


# --- Every config --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("each", "without_lse_too"), every_config())
def test_every_config_writes_all_of_o_as_accurately_as_pytorch(arch, each, without_lse_too):
    """Of whole tiles and of incomplete ones."""
    config = skip_unless_it_runs(each, arch)
    for lengths in ((LENGTH, LENGTH), INCOMPLETE):
        case = problem(config.dtype, config.d_head, *lengths)
        if without_lse_too:
            compile_with_and_without_lse(config, case.q, case.k, AttentionOptions())
            out = poisoned(case.q)
            assert run_forward(config, case.q, case.k, case.v, out=out) is out
            assert_right(out, case)
        out = poisoned(case.q)
        o, lse = run_forward(config, case.q, case.k, case.v, out=out, return_lse=True)
        assert_right(o, case)
        assert (lse.shape, lse.dtype) == (case.lse.shape, torch.float32)
        assert (lse.double() - case.lse).abs().max().item() <= LSE_TOLERANCE


@pytest.mark.parametrize(("q_length", "kv_length"), [(128, 1024), (1024, 64), (128, 64), (384, 448)])
def test_lengths_of_queries_and_keys_may_differ(config, q_length, kv_length):
    case = problem(config.dtype, config.d_head, q_length, kv_length)
    out = poisoned(case.q)
    assert_right(run_forward(config, case.q, case.k, case.v, out=out), case)


def test_large_scores_do_not_overflow(config):
    case = problem(config.dtype, config.d_head)
    q = case.q * 64
    o = run_forward(config, q, case.k, case.v)
    reference, _ = truth(q, case.k, case.v, {})
    assert o.isfinite().all().item()
    assert relative_error(o, reference) <= 0.02


def test_the_scale_is_used(config):
    case = problem(config.dtype, config.d_head)
    o = run_forward(config, case.q, case.k, case.v, scale=0.25)
    reference, _ = truth(case.q, case.k, case.v, {"scale": 0.25})
    assert relative_error(o, reference) <= 0.01
    assert relative_error(o, case.reference) > 0.1


# --- Layouts -------------------------------------------------------------------------------------------------


def rows_before_heads(x: Any) -> Any:
    """The same values as a view of a (batch, rows, heads, d_head) tensor."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other_batch(x: Any) -> Any:
    """The same values as every other batch of a larger tensor, whose others are NaN."""
    larger = torch.full((2 * x.shape[0], *x.shape[1:]), math.nan, dtype=x.dtype, device=x.device)
    larger[::2] = x
    return larger[::2]


def part_of_longer_rows(x: Any) -> Any:
    """The same values in the middle of rows three times as long, as in a fused QKV projection."""
    larger = torch.full((*x.shape[:-1], 3 * x.shape[-1]), math.nan, dtype=x.dtype, device=x.device)
    part = larger[..., x.shape[-1] : 2 * x.shape[-1]]
    part.copy_(x)
    return part


@pytest.mark.parametrize("arrange", [rows_before_heads, every_other_batch, part_of_longer_rows])
def test_any_strides_over_contiguous_rows_give_the_same_result(config, arrange):
    case = problem(config.dtype, config.d_head)
    expected = run_forward(config, case.q, case.k, case.v)
    q, k, v = (arrange(x) for x in (case.q, case.k, case.v))
    assert not q.is_contiguous()
    out = arrange(poisoned(case.q))
    assert torch.equal(run_forward(config, q, k, v, out=out), expected)
    assert torch.equal(run_forward(config, q, k, v), expected)


def test_nothing_is_written_outside_of_the_output(config):
    case = problem(config.dtype, config.d_head)
    larger = torch.full((BATCH, HEADS, LENGTH + 256, 3 * config.d_head), 7.0, dtype=case.q.dtype, device="cuda")
    columns = slice(config.d_head, 2 * config.d_head)
    out = larger[:, :, 128 : 128 + LENGTH, columns]
    run_forward(config, case.q, case.k, case.v, out=out)
    assert_right(out, case)
    out.fill_(7.0)
    assert (larger == 7.0).all().item()


# --- Streams and graphs --------------------------------------------------------------------------------------


def test_the_kernel_runs_on_the_current_stream(config):
    case = problem(config.dtype, config.d_head)
    run_forward(config, case.q, case.k, case.v)  # compiled and loaded: what follows only queues
    late_q = torch.zeros_like(case.q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds; a launch on another stream would read zeros
        late_q.copy_(case.q)
        o = run_forward(config, late_q, case.k, case.v)
    stream.synchronize()
    assert_right(o, case)


def test_a_captured_graph_replays_the_kernel_on_new_inputs(config):
    case = problem(config.dtype, config.d_head)
    q, out = torch.zeros_like(case.q), poisoned(case.q)
    run_forward(config, q, case.k, case.v, out=out)  # loading a kernel is no part of a graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_forward(config, q, case.k, case.v, out=out)
    q.copy_(case.q)
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_right(out, case)


def test_results_are_the_same_every_time(config):
    case = problem(config.dtype, config.d_head)
    first, *others = (run_forward(config, case.q, case.k, case.v) for _ in range(21))
    assert_same_bits([first], [[other] for other in others])


# --- Errors --------------------------------------------------------------------------------------------------


def test_a_tensor_on_the_cpu_is_refused_by_name():
    case = problem(TUNED.dtype, TUNED.d_head)
    with pytest.raises(ValueError, match="k is on cpu, q on cuda:0; all tensors must be on one GPU"):
        run_forward(TUNED, case.q, case.k.cpu(), case.v)
    with pytest.raises(ValueError, match="out is on cpu, q on cuda:0; all tensors must be on one GPU"):
        run_forward(TUNED, case.q, case.k, case.v, out=case.q.cpu())


def test_tensors_on_two_gpus_are_refused():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = problem(TUNED.dtype, TUNED.d_head)
    with pytest.raises(ValueError, match="v is on cuda:1, q on cuda:0; all tensors must be on one GPU"):
        run_forward(TUNED, case.q, case.k, case.v.to("cuda:1"))


def test_inputs_that_the_config_does_not_compute_are_refused():
    case = problem(TUNED.dtype, TUNED.d_head)
    run_forward(TUNED, case.q, case.k, case.v)  # a good call of the same kind hides nothing
    with pytest.raises(ValueError, match=r"q: dtype is torch.bfloat16, but the config computes FP16"):
        run_forward(PLAIN, case.q, case.k, case.v)
    with pytest.raises(ValueError, match=r"q: head_dim 60 is not allowed"):
        run_forward(TUNED, *(x[..., :60] for x in (case.q, case.k, case.v)))
    with pytest.raises(ValueError, match=r"q has 4 heads, which is not a multiple of the 3 heads"):
        run_forward(TUNED, case.q, case.k[:, :3], case.v[:, :3])
    with pytest.raises(ValueError, match="k and v must have the same shape"):
        run_forward(TUNED, case.q, case.k, case.v[:, :, :-1])
    with pytest.raises(ValueError, match="k: batch is 1, but q's is 2"):
        run_forward(TUNED, case.q, case.k[:1], case.v[:1])
    with pytest.raises(ValueError, match=r"out: .* does not match q"):
        run_forward(TUNED, case.q, case.k, case.v, out=case.q[:1])
    with pytest.raises(ValueError, match="out: the last dimension has stride 512"):
        run_forward(TUNED, case.q, case.k, case.v, out=torch.empty_like(case.q.mT.contiguous()).mT)
    assert_right(run_forward(TUNED, case.q, case.k, case.v), case)


def test_inputs_whose_rows_are_not_contiguous_are_copied(config):
    case = problem(config.dtype, config.d_head)
    expected = run_forward(config, case.q, case.k, case.v)
    transposed = [x.mT.contiguous().mT for x in (case.q, case.k, case.v)]
    for _ in range(3):
        assert torch.equal(run_forward(config, *transposed), expected)


def test_a_config_that_needs_more_shared_memory_than_the_gpu_has_is_refused():
    q = torch.zeros(1, 1, 256, 256, dtype=torch.bfloat16, device="cuda")
    with pytest.raises((ValueError, GPUError), match="shared memory"):
        run_forward("(BF16, 256, 256, 256, 16): async+swizzled+load_2_2_2_tiles+opt_softmax", q, q, q)
