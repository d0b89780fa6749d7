"""`attention()` on a GPU: any problem as accurately as PyTorch's own kernels, as a part of PyTorch."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attention_cases import Case, laid_out, random_case, relative_error, relative_errors
from samples import first_of
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashwright.operators.torch_ops  # noqa: F401 (registers the operators)
from flashwright.attention import attention
from flashwright.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashwright.integrations.sdpa import scaled_dot_product_attention
from flashwright.runtime.forward import run_forward

from .tools import (
    ERROR_OVER_PYTORCH,
    assert_as_accurate,
    assert_close_lse,
    by_pytorch,
    compile_with_and_without_lse,
    config_for,
    eager_gradients,
    options_of,
    slices_of,
    some,
    starts_of,
    truth,
    window_of,
)

LONGEST = 2000
FEWEST_ELEMENTS = 2**15
"""Of an output, so that the ratio of two errors is not a matter of luck; reached with more batches."""


CASES = first_of([random_case(seed, random.Random(seed).choice([20, 150, 600, LONGEST])) for seed in range(320)], 160)
PACKED_CASES = first_of([random_case(1000 + seed, 400) for seed in range(40)], 24)


def inputs(case: Case, seed: int = 0) -> tuple[Any, Any, Any]:
    """On the GPU, contiguous; the layout of the case is for `laid_out`."""
    rows, _ = case.lengths
    batch = max(1, math.ceil(FEWEST_ELEMENTS / (case.heads[0] * rows * case.head_dim)))
    q_shape, kv_shape = ((batch, heads, n, case.head_dim) for heads, n in zip(case.heads, case.lengths, strict=True))
    return some(getattr(torch, case.dtype), q_shape, kv_shape, seed=seed)


def varlen(
    q: Any, k: Any, v: Any, q_starts: Any, k_starts: Any, longest: tuple[int, int], options: dict[str, Any]
) -> tuple[Any, Any]:
    """The drop-in for `flash_attn`: output and log-sum-exp."""
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, q_starts, k_starts, *longest, softmax_scale=options.get("scale"),
        causal=options.get("causal", False), window_size=options.get("window") or (-1, -1),
        softcap=options.get("softcap", 0.0), return_attn_probs=True,
    )  # fmt: skip
    return out, lse


# --- Any problem -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_problem_is_computed_as_accurately_as_by_pytorch(family, case):
    q, k, v = inputs(case)
    expected, expected_lse = truth(q, k, v, case.options)
    pytorchs = by_pytorch(q, k, v, case.options)
    compile_with_and_without_lse(config_for(q, k, case.options, family), q, k, options_of(case.options))
    q, k, v = (laid_out(x, case.layout) for x in (q, k, v))
    # With and without the log-sum-exp are two kernels.
    assert_as_accurate(attention(q, k, v, **case.options, family=family), expected, pytorchs)
    out, lse = attention(q, k, v, **case.options, family=family, return_lse=True)
    assert_as_accurate(out, expected, pytorchs)
    assert_close_lse(lse, expected_lse)


@pytest.mark.parametrize("case", PACKED_CASES, ids=str)
def test_packed_sequences_are_computed_as_accurately_as_by_pytorch(family, case):
    options = case.options | ({"causal": True} if "causal" in case.options else {})
    draw = random.Random(str(case))
    lengths = [(draw.randint(0, case.lengths[0]), draw.randint(1, case.lengths[1])) for _ in range(6)]
    row_lengths, key_lengths = zip(*lengths, case.lengths, strict=True)
    q_starts, k_starts = starts_of(row_lengths), starts_of(key_lengths)
    q_shape, kv_shape = (
        (sum(each), heads, case.head_dim) for each, heads in zip((row_lengths, key_lengths), case.heads, strict=True)
    )
    q, k, v = some(getattr(torch, case.dtype), q_shape, kv_shape, seed=0)
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    config = config_for(*heads_first[:2], options, family, case.lengths)
    out, lse = run_forward(
        config, *heads_first, scale=options.get("scale"), window=window_of(options),
        softcap=options.get("softcap", 0.0), return_lse=True, cu_seqlens_q=q_starts, cu_seqlens_k=k_starts,
        max_seqlen_q=case.lengths[0], max_seqlen_k=case.lengths[1],
    )  # fmt: skip
    results = [(out[0].transpose(0, 1), lse[0])]
    if config == config_for(*heads_first[:2], options, None, case.lengths):
        results.append(varlen(q, k, v, q_starts, k_starts, case.lengths, options))
    expected, expected_lse, pytorchs = torch.zeros_like(q, dtype=torch.float64), [], torch.zeros_like(q)
    for row, key in zip(slices_of(row_lengths), slices_of(key_lengths), strict=True):
        if row.start == row.stop:
            continue
        part = [x.transpose(0, 1).unsqueeze(0).contiguous() for x in (q[row], k[key], v[key])]
        sequence, sequence_lse = truth(*part, options)
        expected[row] = sequence[0].transpose(0, 1)
        expected_lse.append(sequence_lse[0])
        pytorchs[row] = by_pytorch(*part, options)[0].transpose(0, 1)
    for out, lse in results:
        assert_as_accurate(out, expected, pytorchs)
        assert_close_lse(lse, torch.cat(expected_lse, dim=1))


# --- Numbers that are not ordinary -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [30.0, 500.0])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 30.0}], ids=str)
def test_large_scores_do_not_overflow(family, dtype, magnitude, options):
    q, k, v = some(dtype)
    q = q * magnitude
    out, lse = attention(q, k, v, **options, return_lse=True, family=family)
    expected, expected_lse = truth(q, k, v, options)
    assert out.isfinite().all().item()
    assert_as_accurate(out, expected, by_pytorch(q, k, v, options))
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 10)}], ids=str)
@pytest.mark.parametrize("where", ["q", "k"])
def test_a_nan_goes_where_it_is_seen_and_nowhere_else(family, options, where):
    q, k, v = some()
    {"q": q, "k": k}[where][0, 1, 137, 5] = math.nan
    out, lse = attention(q, k, v, **options, return_lse=True, family=family)
    expected, expected_lse = truth(q, k, v, options)
    assert torch.equal(lse.isnan(), expected_lse.isnan())
    assert torch.equal(out.isnan().any(dim=-1), expected.isnan().any(dim=-1))


def test_infinite_scores_are_nan_as_in_pytorch(family):
    q, k, v = some()
    q[0, 0, 7] = math.inf
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        expected = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(attention(q, k, v, family=family).isnan(), expected.isnan())


def test_rows_without_keys_are_zero(family):
    q, k, v = some(kv_shape=(2, 2, 100, 64))
    out, lse = attention(q, k, v, causal=True, return_lse=True, family=family)
    assert (out[:, :, :200] == 0).all().item() and (lse[:, :, :200] == -math.inf).all().item()
    assert lse[:, :, 200:].isfinite().all().item()


@pytest.mark.parametrize(
    "shapes", [((0, 4, 9, 64), (0, 2, 9, 64)), ((2, 4, 0, 64), (2, 2, 9, 64)), ((2, 4, 9, 64), (2, 2, 0, 64))]
)
def test_tensors_without_elements(shapes):
    q, k, v = some(None, *shapes, grad=True)
    out, lse = attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    assert (out == 0).all().item() and (lse == -math.inf).all().item()
    out.sum().backward()
    assert (k.grad == 0).all().item()
    with torch.no_grad():
        assert attention(q, k, v).shape == q.shape


# --- Gradients -------------------------------------------------------------------------------------------------------


def gradients(out: Any, inputs: tuple[Any, ...], grad: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(out, inputs, grad.to(out.dtype))


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.float16, 40), (torch.bfloat16, 64), (torch.float16, 128), (torch.bfloat16, 256),
        *(pytest.param(dtype, head_dim, marks=pytest.mark.slow) for dtype, head_dim in (
            (torch.bfloat16, 40), (torch.float16, 64), (torch.bfloat16, 128), (torch.float16, 256),
        )),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": "top-left"}, {"window": (90, 20)}, {"causal": True, "window": (64, -1)},
     {"causal": "top-left", "window": (100, -1)}, {"softcap": 10.0, "causal": True}, {"scale": 0.3}],
    ids=str,
)  # fmt: skip
def test_gradients_are_as_accurate_as_pytorchs(dtype, head_dim, options):
    for lengths in ((200, 200), (130, 300), (300, 130)):
        q, k, v = some(dtype, (2, 4, lengths[0], head_dim), (2, 2, lengths[1], head_dim), grad=True)
        doubles = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
        expected = truth(*doubles, options)[0]
        grad = torch.randn(expected.shape, device="cuda", dtype=torch.float64)
        expected_gradients = gradients(expected, doubles, grad)
        actual = gradients(attention(q, k, v, **options), (q, k, v), grad)
        eager = eager_gradients(q, k, v, grad, options)
        for name, a, e, x in zip("qkv", actual, eager, expected_gradients, strict=True):
            error, eager_error = relative_errors(x, a, e)  # NaN, if an element is
            assert error <= ERROR_OVER_PYTORCH * eager_error < math.inf, name


def test_gradients_flow_from_the_log_sum_exp():
    q, k, v = some(torch.float16, grad=True)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    doubles = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    expected, expected_lse = truth(*doubles, {"causal": True})
    actual = torch.autograd.grad(out.float().sin().sum() + lse.sin().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.sin().sum() + expected_lse.sin().sum(), doubles)
    for a, x in zip(actual, wanted, strict=True):
        assert relative_error(a, x) <= 5e-3


def test_packed_sequences_have_gradients():
    q, k, v = some(torch.float16, (300, 4, 64), (300, 2, 64), grad=True)
    starts = torch.tensor([0, 100, 101, 300], dtype=torch.int32, device="cuda")
    for deterministic in (False, True):
        out = flash_attn_varlen_func(q, k, v, starts, starts, 199, 199, causal=True, deterministic=deterministic)
        doubles = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
        parts = []
        for first, last in ((0, 100), (100, 101), (101, 300)):
            part = (x[first:last].transpose(0, 1).unsqueeze(0) for x in doubles)
            parts.append(truth(*part, {"causal": True})[0][0].transpose(0, 1))
        expected = torch.cat(parts)
        for a, x in zip(
            torch.autograd.grad(out.float().square().sum(), (q, k, v)),
            torch.autograd.grad(expected.square().sum(), doubles),
            strict=True,
        ):
            assert relative_error(a, x) <= 3e-3


# --- As a part of PyTorch --------------------------------------------------------------------------------------------


def test_the_operator_and_the_direct_launch_give_the_same_bits():
    q, k, v = some()
    direct, direct_lse = attention(q, k, v, causal=True, return_lse=True)
    out, lse = torch.ops.flashwright.attention_forward(q, k, v, None, None, 0, True, 0.0, True, "", False)
    assert torch.equal(out, direct) and torch.equal(lse, direct_lse)
    for x in (q, k, v):
        x.requires_grad_()
    assert torch.equal(attention(q, k, v, causal=True), direct)


def test_pytorch_finds_nothing_wrong_with_the_operator():
    q, k, v = some(grad=True)
    arguments = (q, k, v, None, None, 0, True, 0.0, True, "", False)
    # Gradients of several runs are compared element by element: additions to dq must come in a fixed order.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        torch.library.opcheck(torch.ops.flashwright.attention_forward.default, arguments)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_functions_have_no_graph_breaks(backend, grad):
    if backend == "inductor":
        pytest.importorskip("triton")
    torch._dynamo.reset()

    def model(q, k, v):
        out = attention(q * 1.5, k, v, causal=True)
        other = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), window_size=(9, 9)).transpose(1, 2)
        return out + other + scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v = some(grad=grad)
    expected = model(q, k, v)
    actual = torch.compile(model, fullgraph=True, backend=backend)(q, k, v)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    if grad:
        for a, b in zip(
            torch.autograd.grad(actual.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
        ):
            assert relative_error(a, b.double()) <= 2e-2


def test_a_captured_graph_replays_on_new_inputs():
    q, k, v = some()
    expected = attention(q, k, v, causal=True)
    late = torch.zeros_like(q)
    attention(late, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(late, k, v, causal=True)
    late.copy_(q)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_the_current_stream_is_used():
    q, k, v = some()
    expected = attention(q, k, v)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        torch.cuda._sleep(50_000_000)  # a launch on another stream would read zeros
        late.copy_(q)
        out = attention(late, k, v)
    stream.synchronize()
    assert torch.equal(out, expected)


class SeesFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class SeesOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode_type", [SeesFunctions, SeesOperators])
def test_a_mode_of_pytorch_sees_the_call(mode_type):
    q, k, v = some()
    expected = attention(q, k, v, causal=True)  # planned: the next call could go straight to the launch
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    starts = [starts_of([x.shape[0]]) for x in packed[:2]]
    with mode_type() as mode:
        out = attention(q, k, v, causal=True)
        flash_attn_varlen_func(*packed, *starts, 300, 500)
    assert torch.equal(out, expected)
    for name in ("attention_forward", "attention_varlen_forward"):
        assert sum(f"flashwright.{name}" in seen for seen in mode.seen) == 1


def test_the_tensors_gpu_is_used_not_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = some()
    expected = attention(q, k, v)
    other = [x.to("cuda:1") for x in (q, k, v)]
    assert torch.equal(attention(*other).cpu(), expected.cpu())


def test_wrong_tensors_are_named():
    q, k, v = some()
    with pytest.raises(ValueError, match=r"k is on cpu, q on cuda:0; all tensors must be on one device"):
        attention(q, k.cpu(), v)
    with pytest.raises(ValueError, match=r"q: dtype torch.float32 is not allowed"):
        attention(q.float(), k.float(), v.float())
    with pytest.raises(ValueError, match=r"backend: 'simulator' needs CPU tensors"):
        attention(q, k, v, backend="simulator")
    reference = attention(q, k, v, backend="reference")
    assert relative_error(attention(q, k, v), reference.double()) <= 1e-2


# --- transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("Qwen3", {"head_dim": 64}),
    ],
)
def test_models_of_transformers_give_the_same_logits(family, options):
    transformers = pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
    from flashwright.integrations.transformers import register

    register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=199, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, **options,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config).to("cuda", torch.float16).eval()
    tokens = torch.randint(0, 199, (2, 70), device="cuda")
    results = {}
    for implementation in ("flashwright", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits = model(tokens).logits
            generated = model.generate(
                tokens, max_new_tokens=12, do_sample=False, pad_token_id=0, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        results[implementation] = logits, generated
    (logits, generated), (expected, expected_generated) = results["flashwright"], results["sdpa"]
    assert relative_error(logits, expected.double()) <= 5e-3
    assert relative_error(generated.logits[0], expected_generated.logits[0].double()) <= 5e-3
    same = (generated.sequences == expected_generated.sequences)[:, 70:]
    # Greedy choices may part where two tokens are as likely as each other, not before.
    assert same[:, :4].all().item()
    for step, (a, b) in enumerate(zip(generated.logits, expected_generated.logits, strict=True)):
        agreeing = same[:, :step].all(dim=1)
        assert relative_error(a[agreeing], b[agreeing].double()) <= 1e-2
