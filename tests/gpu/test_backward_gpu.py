"""The backward on a GPU: gradients by FlashAttention's rule, the same bits where they are promised, as a part of
PyTorch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attention_cases import laid_out, random_case, relative_error
from samples import first_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flashwright.attention import attention
from flashwright.choice.choose import backward_config
from flashwright.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashwright.kernels.backward.launch import Scratch
from flashwright.kernels.family import KernelConfig, KernelFamily, Occasion
from flashwright.kernels.launch import Sizes
from flashwright.kernels.registry import family_of, parse_config
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import length_bucket
from flashwright.runtime.backward import run_backward
from flashwright.workbench.bench.scores import score_inputs

from .tools import (
    assert_gradients_as_accurate,
    assert_same_bits,
    eager_gradients,
    flash_gradients,
    packed_truth,
    poison,
    slices_of,
    some,
    starts_of,
    this_gpu,
    true_gradients,
    window_of,
)

SCORES = (
    "normal", "normal-x4", "normal-x10", "mixed-heads", "rising", "falling-fast", "waves", "outlier-keys", "sink",
    "early-peak", "one-hot",
)  # fmt: skip


CASES = first_of([random_case(2000 + seed, random.Random(seed).choice([20, 150, 600])) for seed in range(300)], 48)
PACKED_CASES = first_of([random_case(3000 + seed, 300) for seed in range(60)], 16)


def config_of(family: KernelFamily, q: Any, lengths: tuple[int, int], options: dict[str, Any], **request: Any) -> Any:
    """What the gradients of such tensors are computed by in a family."""
    causal = window_of(options).right is not None
    buckets = map(length_bucket, lengths)
    occasion = Occasion(DType.parse(str(q.dtype)), q.shape[-1], causal, *buckets, this_gpu())
    return backward_config(occasion, family=family.name, **request)


def arguments_of(options: dict[str, Any]) -> dict[str, Any]:
    """`attention()`'s options as `run_backward` takes them."""
    return {"window": window_of(options), "scale": options.get("scale"), "softcap": options.get("softcap", 0.0)}


def yardsticks_of(
    q: Any, k: Any, v: Any, do: Any, options: dict[str, Any], out: Any, lse: Any
) -> tuple[tuple[Any, ...], ...]:
    return (
        eager_gradients(q, k, v, do, options, softmax_dtype=q.dtype),
        flash_gradients(q, k, v, do, options, out, lse),
    )


def grad_like(out: Any) -> Any:
    generator = torch.Generator(device=out.device).manual_seed(7)
    return torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)


# --- Any problem -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_of_any_problem_obey_flash_attentions_rule(backward_family, case):
    draw = random.Random(str(case))
    (heads, kv_heads), (rows, keys) = case.heads, case.lengths
    q, k, v = score_inputs(
        draw.choice(SCORES), batch=draw.choice([1, 2]), heads=heads, kv_heads=kv_heads, q_length=rows, kv_length=keys,
        d_head=case.head_dim, dtype=getattr(torch, case.dtype), device="cuda",
    )  # fmt: skip
    out, lse = attention(q, k, v, **case.options, return_lse=True)
    do = grad_like(out)
    expected = true_gradients(q, k, v, do, case.options)
    yardsticks = yardsticks_of(q, k, v, do, case.options, out, lse)
    config = config_of(backward_family, q, case.lengths, case.options, deterministic=draw.random() < 0.3)
    tensors = [laid_out(x, case.layout) for x in (do, q, k, v)]
    for _ in range(2):  # a plan that is made, and one that is kept
        poison(q)
        poison(k)
        gradients = run_backward(config, *tensors, out, lse, **arguments_of(case.options))
        assert_gradients_as_accurate(gradients, expected, *yardsticks)


WAYS_TO_DQ = (
    "hopper backward (BF16, 64, 128, 128, 2): stages_3_2+register_P+bulk_dQ",
    "hopper backward (BF16, 128, 64, 128, 2): stages_3_3+register_P+bulk_dQ",
    "hopper backward (BF16, 128, 64, 64, 1): stages_2_1+paired",
    "hopper backward (BF16, 64, 128, 128, 2): stages_3_2+register_P",
    "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P+persistent+keys_ahead",
    "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P+bulk_dQ+persistent+keys_ahead",
    "hopper backward (BF16, 128, 64, 128, 2): stages_3_3+register_P",
    "hopper backward (BF16, 128, 64, 128, 2): stages_3_2+register_P+persistent",
    "hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P+persistent+keys_ahead",
    "hopper backward (BF16, 128, 64, 128, 2): stages_3_3+register_P+persistent+skips_masked",
    "hopper backward (BF16, 256, 64, 64, 2): stages_2_2+persistent",
    "hopper backward (BF16, 256, 64, 64, 2): stages_2_1+paired+persistent",
    "hopper backward (BF16, 256, 64, 64, 2): stages_2_2",
)
"""Persistent thread blocks have several blocks of keys each."""


def in_order(text: str) -> KernelConfig:
    """The same in a fixed order, in which the last to add finishes, but for the copy engine."""
    config = parse_config(text)
    return replace(config, ordered=True, finishes_dQ=not config.bulk_dQ)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("config", [*map(parse_config, WAYS_TO_DQ), *map(in_order, WAYS_TO_DQ)], ids=str)
def test_every_way_to_add_to_dq_obeys_flash_attentions_rule(arch, config, causal):
    if not family_of(config).runs_on(arch):
        pytest.skip(f"the Hopper family does not run on {arch}")
    options = {"causal": True} if causal else {}
    batch = 10 if config.persistent else 2  # more blocks of keys than an H200 has multiprocessors
    q, k, v = some(torch.bfloat16, (batch, 4, 700, config.d_head), (batch, 2, 900, config.d_head))
    out, lse = attention(q, k, v, **options, return_lse=True)
    do = grad_like(out)
    yardsticks = yardsticks_of(q, k, v, do, options, out, lse)
    gradients = run_backward(config, do, q, k, v, out, lse, **arguments_of(options))
    assert_gradients_as_accurate(gradients, true_gradients(q, k, v, do, options), *yardsticks)


@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_gradients_of_packed_sequences_obey_flash_attentions_rule(backward_family, case):
    options = case.options | ({"causal": True} if "causal" in case.options else {})
    draw = random.Random(str(case))
    lengths = [(draw.randint(0, case.lengths[0]), draw.randint(1, case.lengths[1])) for _ in range(5)]
    lengths = [*lengths, case.lengths]
    first = draw.choice([0, 13])
    row_lengths, key_lengths = zip(*lengths, strict=True)
    q_starts, k_starts = starts_of(row_lengths, first), starts_of(key_lengths, first)
    q_shape, kv_shape = (
        (1, heads, first + sum(each) + draw.choice([0, 9]), case.head_dim)
        for each, heads in zip((row_lengths, key_lengths), case.heads, strict=True)
    )
    q, k, v = some(getattr(torch, case.dtype), q_shape, kv_shape)
    out, lse = packed_truth(q, k, v, q_starts, k_starts, options)
    out, lse = out.to(q.dtype), lse.float()
    do = grad_like(out)
    expected = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    yardsticks = [[torch.zeros_like(x) for x in (q, k, v)] for _ in range(2)]
    for row, key in zip(slices_of(row_lengths, first), slices_of(key_lengths, first), strict=True):
        if row.start == row.stop:
            continue
        sequence = q[:, :, row], k[:, :, key], v[:, :, key], do[:, :, row], options
        found_yardsticks = yardsticks_of(*sequence, out[:, :, row], lse[:, :, row])
        for targets, found in zip((expected, *yardsticks), (true_gradients(*sequence), *found_yardsticks), strict=True):
            for target, part, gradient in zip(targets, (row, key, key), found, strict=True):
                target[:, :, part] = gradient
    config = config_of(backward_family, q, case.lengths, options, deterministic=draw.random() < 0.3)
    poison(q)
    poison(k)
    gradients = run_backward(
        config, do, q, k, v, out, lse, **arguments_of(options), cu_seqlens_q=q_starts, cu_seqlens_k=k_starts,
        max_seqlen_q=case.lengths[0], max_seqlen_k=case.lengths[1],
    )  # fmt: skip
    assert_gradients_as_accurate(gradients, expected, *yardsticks)
    outside = [
        part.any()
        for gradient, each in zip(gradients, (row_lengths, key_lengths, key_lengths), strict=True)
        for part in (gradient[:, :, :first], gradient[:, :, first + sum(each) :])
    ]
    assert not torch.stack(outside).any().item()


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 5.0}], ids=str)
def test_gradients_of_the_log_sum_exp_are_added(backward_family, options):
    q, k, v = some(torch.float16)
    out, lse = attention(q, k, v, **options, return_lse=True)
    do, dlse = grad_like(out), torch.randn_like(lse)
    expected = true_gradients(q, k, v, do, options, dlse)
    config = config_of(backward_family, q, (300, 500), options)
    gradients = run_backward(config, do, q, k, v, out, lse, dlse=dlse, **arguments_of(options))
    for gradient, truth in zip(gradients, expected, strict=True):
        assert relative_error(gradient, truth) <= 2e-3


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_losses_of_the_log_sum_exp_reach_queries_and_keys(packed):
    q, k, v = some(torch.float16, (1, 4, 300, 64), (1, 2, 500, 64), grad=True)
    do, dlse = torch.randn_like(q), torch.randn(1, 4, 300, device="cuda")
    parts = [(slice(0, 300), slice(0, 500))]
    if packed:
        parts = [(slice(0, 120), slice(0, 350)), (slice(120, 300), slice(350, 500))]
        rows_first = (x[0].transpose(0, 1) for x in (q, k, v))
        starts = starts_of([120, 180]), starts_of([350, 150])
        out, lse, _ = flash_attn_varlen_func(*rows_first, *starts, 180, 350, causal=True, return_attn_probs=True)
        out, lse = out.transpose(0, 1)[None], lse[None]
    else:
        out, lse = attention(q, k, v, causal=True, return_lse=True)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (do, dlse))
    for row, key in parts:
        sequence = q[:, :, row], k[:, :, key], v[:, :, key], do[:, :, row]
        expected = true_gradients(*sequence, {"causal": True}, dlse[:, :, row])
        for gradient, part, truth in zip(gradients, (row, key, key), expected, strict=True):
            assert relative_error(gradient[:, :, part], truth) <= 2e-3


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_large_inputs_do_not_overflow(causal, head_dim):
    """The case of FlashAttention's `test_flash_attn_bwd_overflow`."""
    q = (torch.randn(2, 5, 5, head_dim, dtype=torch.float16, device="cuda") * 5).requires_grad_()
    k, v = ((torch.randn_like(q) * 3).detach().requires_grad_() for _ in range(2))
    out = flash_attn_func(q, k, v, causal=causal)
    do = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), do)
    heads_first = [x.detach().transpose(1, 2) for x in (q, k, v, do)]
    expected = true_gradients(*heads_first, {"causal": causal})
    out, lse = attention(*heads_first[:3], causal=causal, return_lse=True)
    yardsticks = yardsticks_of(*heads_first, {"causal": causal}, out, lse)
    assert_gradients_as_accurate([x.transpose(1, 2) for x in gradients], expected, *yardsticks)


# --- The same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "runs"),
    [
        *((head_dim, 30) for head_dim in (40, 64, 128, 256)),
        *(
            pytest.param(head_dim, 1000, marks=[pytest.mark.slow, pytest.mark.long])
            for head_dim in (32, 40, 64, 96, 128, 192, 256)
        ),
    ],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_deterministic_gradients_have_the_same_bits_in_every_run(backward_family, head_dim, options, runs):
    q, k, v = some(torch.bfloat16, (2, 8, 700, head_dim), (2, 2, 700, head_dim))
    out, lse = attention(q, k, v, **options, return_lse=True)
    do = grad_like(out)
    config = config_of(backward_family, q, (700, 700), options, deterministic=True)
    run = partial(run_backward, config, do, q, k, v, out, lse, **arguments_of(options))
    assert_same_bits(run(), (run() for _ in range(runs)))


@pytest.mark.parametrize("by", ["attention", "flash_attn_func", "flash_attn_varlen_func", "PyTorch's switch"])
def test_every_way_of_asking_for_deterministic_gradients_gives_them(by):
    q, k, v = some(torch.bfloat16, (1, 4, 1500, 64), (1, 4, 1500, 64), grad=True)
    starts = starts_of([700, 800])

    def gradients() -> Any:
        if by == "attention":
            out = attention(q, k, v, causal=True, deterministic=True)
        elif by == "flash_attn_func":
            out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, deterministic=True)
        elif by == "flash_attn_varlen_func":
            packed = (x[0].transpose(0, 1) for x in (q, k, v))
            out = flash_attn_varlen_func(*packed, starts, starts, 800, 800, causal=True, deterministic=True)
        else:
            out = attention(q, k, v, causal=True)
        return torch.autograd.grad(out, (q, k, v), grad_like(out))

    torch.use_deterministic_algorithms(by == "PyTorch's switch", warn_only=True)
    try:
        assert_same_bits(gradients(), (gradients() for _ in range(20)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradients_of_keys_and_values_have_the_same_bits_without_asking(backward_family):
    q, k, v = some(torch.bfloat16, (1, 4, 1500, 64), (1, 2, 1500, 64))
    out, lse = attention(q, k, v, return_lse=True)
    config, do = config_of(backward_family, q, (1500, 1500), {}), grad_like(out)
    (_, *first), *others = (run_backward(config, do, q, k, v, out, lse) for _ in range(21))
    assert_same_bits(first, (gradients[1:] for gradients in others))


# --- As a part of PyTorch --------------------------------------------------------------------------------------------


def trained(q: Any, k: Any, v: Any, do: Any) -> tuple[Any, ...]:
    """Repeatable gradients."""
    return torch.autograd.grad(attention(q, k, v, causal=True, deterministic=True), (q, k, v), do)


def test_a_training_step_dispatches_no_operator_of_ours():
    q, k, v = some(grad=True)
    out = attention(q, k, v)

    class SeesOperators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "flashwright" not in str(function)
            return function(*args, **(kwargs or {}))

    with SeesOperators():
        torch.autograd.grad(out, (q, k, v), grad_like(out))


def test_the_operators_and_the_recorded_call_give_the_same_bits():
    q, k, v = some(grad=True)
    do = grad_like(q)
    request = (None, None, 0, True, 0.0, True, "", True)
    out, _ = torch.ops.flashwright.attention_forward(q, k, v, *request)
    for a, b in zip(trained(q, k, v, do), torch.autograd.grad(out, (q, k, v), do), strict=True):
        assert torch.equal(a, b)


def test_the_current_stream_is_used():
    q, k, v = some(grad=True)
    do = grad_like(q)
    expected = trained(q, k, v, do)
    late = torch.zeros_like(do)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = attention(q, k, v, causal=True, deterministic=True)
        torch.cuda._sleep(50_000_000)  # launches on another stream would read zeros
        late.copy_(do)
        gradients = torch.autograd.grad(out, (q, k, v), late)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def packed_step(q: Any, k: Any, v: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Repeatable gradients of two sequences, by the gradient of their output."""
    starts, kv_starts = starts_of([100, 200]), starts_of([300, 200])

    def step(do: Any) -> tuple[Any, ...]:
        rows_first = (x[0].transpose(0, 1) for x in (q, k, v))
        out = flash_attn_varlen_func(*rows_first, starts, kv_starts, 200, 300, causal=True, deterministic=True)
        return torch.autograd.grad(out, (q, k, v), do[0].transpose(0, 1))

    return step


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_captured_training_step_replays_on_new_inputs(packed):
    q, k, v = some(grad=True)
    step = packed_step(q, k, v) if packed else partial(trained, q, k, v)
    do = grad_like(q)
    expected = step(do)
    late = torch.zeros_like(do)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(late)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = step(late)
    late.copy_(do)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.long
def test_compiled_training_gives_the_same_gradients():
    torch._dynamo.reset()
    q, k, v = some(grad=True)
    starts, kv_starts = starts_of([100, 200]), starts_of([300, 200])

    def model(q, k, v):
        dense = attention(q, k, v, causal=True, softcap=20.0, deterministic=True)
        packed = flash_attn_varlen_func(
            *(x[0].transpose(0, 1) for x in (q, k, v)), starts, kv_starts, 200, 300, deterministic=True
        )
        return dense.sum() + packed.float().square().sum()

    expected = torch.autograd.grad(model(q, k, v), (q, k, v))
    actual = torch.autograd.grad(torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b.double()) <= 1e-2


def test_threads_train_at_the_same_time():
    problems = [some(None, (1, 2, 200 + n, 64), (1, 2, 300 + n, 64), grad=True, seed=n) for n in range(8)]
    expected = [trained(*problem, grad_like(problem[0])) for problem in problems]
    torch.cuda.synchronize()

    def work(number: int) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            problem = problems[number]
            found = [trained(*problem, grad_like(problem[0])) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
            return found

    with ThreadPoolExecutor(8) as pool:
        for found, wanted in zip(pool.map(work, range(8)), expected, strict=True):
            assert_same_bits(wanted, found)


def test_a_checkpointed_call_gives_the_same_gradients():
    q, k, v = some(grad=True)
    do = grad_like(q)

    def call(q, k, v):
        return attention(q, k, v, causal=True, deterministic=True)

    out = checkpoint(call, q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), do), trained(q, k, v, do), strict=True):
        assert torch.equal(a, b)


def test_a_saved_forward_is_differentiated_twice():
    q, k, v = some(grad=True)
    out = attention(q, k, v, causal=True, deterministic=True)
    first, second = (torch.autograd.grad(out, (q, k, v), grad_like(out), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("grad", [lambda out: out.sum(), lambda out: (out.mT.contiguous().mT * 2).sum()])
def test_gradients_of_any_strides_are_taken(grad):
    q, k, v = some(torch.float16, grad=True)
    gradients = torch.autograd.grad(grad(attention(q, k, v, causal=True).transpose(1, 2)), (q, k, v))
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(grad(attention(*doubles, causal=True, backend="reference").transpose(1, 2)), doubles)
    for gradient, truth in zip(gradients, expected, strict=True):
        assert relative_error(gradient, truth) <= 2e-3


def test_a_backward_takes_no_memory_beyond_its_rows(backward_family):
    q, k, v = some(torch.bfloat16, (1, 8, 4096, 128), (1, 2, 4096, 128))
    out, lse = attention(q, k, v, return_lse=True)
    do = grad_like(out)
    config = config_of(backward_family, q, (4096, 4096), {})
    run_backward(config, do, q, k, v, out, lse)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients = run_backward(config, do, q, k, v, out, lse)
    taken = torch.cuda.max_memory_allocated() - before
    scratch = Scratch.of(config, Sizes(1, 8, 2, 4096, 4096)).total
    assert taken <= scratch + sum(x.numel() * x.element_size() for x in gradients) + 2**21
    assert scratch <= math.ceil(1.1 * q.numel() * 4)


def test_new_lengths_compile_and_load_nothing(kernel_counts):
    def step(rows: int) -> None:
        q, k, v = some(None, (1, 2, rows, 64), (1, 2, rows, 64), grad=True)
        attention(q, k, v, causal=True).sum().backward()

    step(100)
    kernel_counts.reset()
    for rows in range(101, 900, 97):
        step(rows)
    assert (kernel_counts.compiled, kernel_counts.loaded) == (0, 0)
