"""`attention()`: what it computes, on the reference and on the simulated kernel, and what it refuses.

The truth is attention written out naively in float64, with an explicit mask.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
import typing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import every_other

from flashwright.attention import attention
from flashwright.kernels.registry import parse_config
from flashwright.operators.forward import config_chosen_for
from flashwright.operators.plain_calls import LAUNCHED
from flashwright.problem.options import AttentionOptions, as_window
from flashwright.problem.window import Window
from flashwright.runtime.forward import run_forward

torch = pytest.importorskip("torch")

from attention_cases import ERROR_BOUNDS, Truth, laid_out, naive, random_case, relative_error, tensors

from flashwright.operators import forward
from flashwright.runtime import reference


def assert_is(result: Any, truth: Truth, tolerance: float = 1e-12) -> None:
    out, lse = result
    torch.testing.assert_close(out.double(), truth.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), truth.lse, rtol=tolerance, atol=tolerance)


# --- What is computed ------------------------------------------------------------------------------------------------

MASKS = [
    {},
    {"causal": True},
    {"causal": "bottom-right"},
    {"causal": "top-left"},
    {"window": (2, 3)},
    {"window": (0, 0)},
    {"window": (-1, 2)},
    {"window": (3, None)},
    {"window": [None, -1]},
    {"causal": True, "window": (2, 5)},
    {"causal": "top-left", "window": (1, -1)},
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(7, 7), (3, 9), (9, 3), (1, 6), (6, 1)])
def test_every_mask_shows_each_row_its_keys(mask, rows, keys):
    q, k, v = tensors((2, 4, rows, 16), (2, 2, keys, 16))
    assert_is(attention(q, k, v, **mask, return_lse=True), naive(q, k, v, **mask))


def test_a_row_without_keys_is_zero_and_its_log_sum_exp_minus_infinity():
    q, k, v = tensors((1, 1, 5, 8), (1, 1, 2, 8))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert (out[:, :, :3] == 0).all()
    assert (lse[:, :, :3] == -math.inf).all()
    assert lse[:, :, 3:].isfinite().all()


def test_the_top_left_mask_is_pytorchs():
    q, k, v = tensors((2, 4, 6, 32), (2, 2, 11, 32))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, causal="top-left"), expected)


@pytest.mark.parametrize("options", [{"scale": 0.3}, {"softcap": 2.0}, {"softcap": 5.0, "scale": 2.0, "causal": True}])
def test_scale_and_softcap(options):
    q, k, v = tensors((1, 6, 9, 24), (1, 3, 13, 24))
    assert_is(attention(q, k, v, **options, return_lse=True), naive(q, k, v, **options))


@given(
    st.integers(1, 12), st.integers(1, 12), st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    st.sampled_from([False, True, "top-left"]), st.one_of(st.none(), st.integers(-1, 14)),
    st.one_of(st.none(), st.integers(-1, 14)), st.sampled_from([0.0, 1.5]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_the_reference_is_what_is_written_in_textbooks(rows, keys, heads, causal, left, right, softcap, seed):
    q, k, v = tensors((1, heads[0], rows, 8), (1, heads[1], keys, 8), seed=seed)
    options = {"causal": causal, "window": (left, right), "softcap": softcap}
    assert_is(attention(q, k, v, **options, return_lse=True), naive(q, k, v, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lower_precisions_are_rounded_only_at_the_end(dtype):
    q, k, v = tensors((2, 4, 33, 64), (2, 4, 65, 64), dtype)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    truth = naive(q, k, v, causal=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert (out.double() - truth.out.to(dtype).double()).abs().max() <= 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(lse.double(), truth.lse, rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow():
    q, k, v = tensors((1, 2, 16, 32), (1, 2, 16, 32), torch.float32)
    q = q * 1e4
    torch.testing.assert_close(attention(q, k, v).double(), naive(q, k, v).out, rtol=1e-3, atol=1e-3)


def test_long_problems_are_computed_a_few_rows_at_a_time(monkeypatch):
    q, k, v = tensors((2, 4, 19, 16), (2, 2, 23, 16), requires_grad=True)
    whole = attention(q, k, v, causal=True, softcap=3.0, return_lse=True)
    monkeypatch.setattr(reference, "SCORES_AT_A_TIME", 4 * 2 * 23 * 5)
    parts = attention(q, k, v, causal=True, softcap=3.0, return_lse=True)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)
    gradients = torch.autograd.grad(whole[0].square().sum(), (q, k, v))
    options = AttentionOptions(Window(None, 0), softcap=3.0)
    by_hand = reference.attention_gradients(2 * whole[0], None, q, k, v, options=options)
    for a, b in zip(gradients, by_hand, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", ["q rows", "keys", "batch", "heads"])
def test_tensors_without_elements(shape):
    batch, heads, rows, keys = (
        0 if shape == n else d for n, d in (("batch", 2), ("heads", 3), ("q rows", 4), ("keys", 5))
    )
    q, k, v = tensors((batch, heads, rows, 16), (batch, heads, keys, 16), torch.bfloat16, requires_grad=True)
    for backend in ("reference", "simulator"):
        with torch.set_grad_enabled(backend == "reference"):
            out, lse = attention(q, k, v, return_lse=True, backend=backend)
        assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
        assert (out == 0).all() and (lse == -math.inf).all()
    attention(q, k, v).sum().backward()
    assert q.grad.shape == q.shape and (k.grad == 0).all()


# --- Gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"causal": "top-left", "window": (2, -1)}, {"softcap": 2.0}], ids=str
)
def test_gradients_are_those_of_the_definition(mask):
    q, k, v = tensors((1, 4, 5, 8), (1, 2, 4, 8), requires_grad=True)

    def both(q, k, v):
        out, lse = attention(q, k, v, **mask, return_lse=True)
        return out, lse.masked_fill(lse == -math.inf, 0)

    assert torch.autograd.gradcheck(both, (q, k, v))


def test_there_are_second_derivatives():
    q, k, v = tensors((1, 2, 3, 8), (1, 1, 4, 8), requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, causal=True), (q, k, v))


# --- The kernel, simulated -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", every_other(random_case(seed, 150) for seed in range(18)))
def test_the_simulated_kernel_computes_any_problem(case):
    dtype = getattr(torch, case.dtype)
    q, k, v = tensors(
        (1, case.heads[0], case.lengths[0], case.head_dim), (1, case.heads[1], case.lengths[1], case.head_dim), dtype
    )
    truth = naive(q, k, v, **case.options)
    q, k, v = (laid_out(x, case.layout) for x in (q, k, v))
    out, lse = attention(q, k, v, **case.options, return_lse=True, backend="simulator")
    assert (out.shape, out.dtype, lse.dtype) == (q.shape, dtype, torch.float32)
    assert relative_error(out, truth.out) <= ERROR_BOUNDS[case.dtype]
    torch.testing.assert_close(lse.double(), truth.lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 4), "softcap": 8.0}], ids=str)
def test_the_simulated_kernel_computes_packed_sequences(options):
    q_lengths, kv_lengths = (33, 0, 1, 70), (33, 5, 40, 20)
    q, k, v = tensors((1, 4, sum(q_lengths), 64), (1, 2, sum(kv_lengths), 64), torch.bfloat16)
    q, k, v = (laid_out(x, "rows first") for x in (q, k, v))
    starts = [torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32) for lengths in (q_lengths, kv_lengths)]
    window = as_window(options.get("causal", False), options.get("window"))
    config = config_chosen_for(q, k, AttentionOptions(window), None)
    out, lse = run_forward(
        config, q, k, v, window=window, softcap=options.get("softcap", 0.0), return_lse=True,
        cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], max_seqlen_q=70, max_seqlen_k=40, device="simulator",
    )  # fmt: skip
    for b, rows in enumerate(q_lengths):
        q_part, k_part = (slice(int(s[b]), int(s[b + 1])) for s in starts)
        if not rows:
            continue
        truth = naive(q[:, :, q_part], k[:, :, k_part], v[:, :, k_part], **options)
        assert relative_error(out[:, :, q_part], truth.out) <= ERROR_BOUNDS["bfloat16"]
        torch.testing.assert_close(lse[:, :, q_part].double(), truth.lse, rtol=1e-3, atol=1e-3)


def test_the_simulator_takes_arrays_as_well():
    q, k, v = tensors((1, 2, 20, 32), (1, 1, 30, 32), torch.float16)
    arrays = [x.numpy() for x in (q, k, v)]
    out = attention(*arrays, causal=True, backend="simulator")
    assert isinstance(out, np.ndarray) and out.dtype == np.float16
    assert np.array_equal(out, attention(q, k, v, causal=True, backend="simulator").numpy())


def test_a_config_overrides_the_choice(monkeypatch):
    used = []
    monkeypatch.setattr(forward, "run_forward", lambda config, *a, **o: used.append(config) or (a[0], a[0][..., 0]))
    q, k, v = tensors((1, 1, 8, 64), (1, 1, 8, 64), torch.float16)
    short_form = "(FP16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax"
    config = parse_config(short_form)
    for given_config in (short_form, config):
        attention(q, k, v, config=given_config, family="ampere", return_lse=True, backend="simulator")
    assert used == [config, config]


def test_a_kernel_named_for_cpu_tensors_runs_on_the_simulator(monkeypatch):
    used = []
    monkeypatch.setattr(forward, "run_forward", lambda config, *a, **o: used.append(config) or a[0])
    q, k, v = tensors((1, 1, 8, 64), (1, 1, 8, 64), torch.float16)
    config = parse_config("(FP16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax")
    attention(q, k, v, config=config)
    attention(q, k, v, family="hopper")
    assert used[0] == config and type(used[1]).__name__ == "HopperForwardKernelConfig"
    with pytest.raises(ValueError, match="config and family name a kernel, which backend='reference' does not run"):
        attention(q, k, v, config=config, backend="reference")


# --- What is refused -------------------------------------------------------------------------------------------------


def test_a_row_invariant_prefill_in_chunks_of_any_length_is_the_whole_one():
    """Short chunks would use another config."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 130, 64, generator=generator).half() for _ in range(3))
    q[:, :, ::3] *= 10
    whole = attention(q, k, v, causal=True, row_invariant=True)
    for begin, end in ((0, 3), (3, 67), (67, 130)):
        part = attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], causal=True, row_invariant=True)
        assert torch.equal(part, whole[:, :, begin:end])


def test_pytorchs_own_products_are_not_row_invariant():
    q = torch.zeros(1, 1, 2, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="row_invariant: backend='reference' uses PyTorch's products"):
        attention(q, q, q, backend="reference", row_invariant=True)


@pytest.mark.parametrize(
    ("options", "what_is_said"),
    [
        ({"causal": "middle"}, r"causal: 'middle' is not allowed; allowed: True, False, 'bottom-right', 'top-left'"),
        ({"causal": 2}, r"causal: 2 is not allowed"),
        ({"window": 3}, r"window: 3 is not allowed; allowed: None, or a pair \(left, right\)"),
        ({"window": (1, 2, 3)}, r"window: \(1, 2, 3\) is not allowed"),
        ({"window": (-2, 0)}, r"window: \(-2, 0\) is not allowed; each side must be None, -1"),
        ({"window": (1.5, 0)}, r"window: \(1.5, 0\) is not allowed"),
        ({"scale": 0.0}, r"scale: 0.0 is not allowed; allowed: None \(1/√head_dim\), or a positive finite number"),
        ({"scale": math.nan}, r"scale: nan is not allowed"),
        ({"softcap": -1.0}, r"softcap: -1.0 is not allowed; allowed: 0 \(none\), or a positive finite number"),
        ({"family": "volta"}, r"family: 'volta' is not known; allowed: ampere, hopper"),
        ({"backend": "tpu"}, r"backend: 'tpu' is not known; allowed: 'gpu', 'simulator', 'reference'"),
        ({"backend": "gpu"}, r"backend: 'gpu' needs CUDA tensors, but q is on cpu"),
        ({"backend": "simulator", "config": "nonsense"}, r"nonsense"),
        ({"backend": "simulator", "config": "(BF16, 64, 64, 32, 4): load_0_0_0_tiles"}, r"BF16, but q is FP16"),
        ({"backend": "simulator", "config": "(FP16, 32, 64, 32, 4): load_0_0_0_tiles"}, r"up to 32, but q has 64"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named(options, what_is_said):
    q, k, v = tensors((1, 2, 4, 64), (1, 2, 4, 64), torch.float16)
    with pytest.raises(ValueError, match=what_is_said):
        attention(q, k, v, **options)


@pytest.mark.parametrize(
    ("shapes", "what_is_said"),
    [
        (((2, 4, 64), (2, 4, 64)), r"q: shape \(2, 4, 64\) is not allowed; allowed: \(batch, heads, rows, head_dim\)"),
        (((1, 2, 4, 64), (2, 2, 4, 64)), r"k: batch is 2, but q's is 1"),
        (((1, 2, 4, 64), (1, 2, 4, 32)), r"k: head_dim is 32, but q's is 64"),
        (((1, 4, 4, 64), (1, 3, 4, 64)), r"q has 4 heads, which is not a multiple of the 3 heads of k and v"),
        (((1, 4, 4, 64), (1, 0, 4, 64)), r"q has 4 heads, which is not a multiple of the 0 heads of k and v"),
        (((1, 1, 4, 36), (1, 1, 4, 36)), r"q: head_dim 36 is not allowed; allowed: multiples of 8 from 8 to 256"),
        (((1, 1, 4, 264), (1, 1, 4, 264)), r"q: head_dim 264 is not allowed"),
        (((1, 1, 4, 0), (1, 1, 4, 0)), r"q: head_dim 0 is not allowed"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "simulator"])
def test_a_wrong_shape_is_named(shapes, what_is_said, backend):
    with pytest.raises(ValueError, match=what_is_said):
        attention(*tensors(*shapes, torch.float16), backend=backend)


def test_tensors_that_do_not_fit_together_are_named():
    q, k, v = tensors((1, 2, 4, 64), (1, 2, 4, 64), torch.float16)
    with pytest.raises(ValueError, match=r"k and v must have the same shape; got \(1, 2, 4, 64\) and \(1, 2, 3, 64\)"):
        attention(q, k, v[:, :, :3])
    with pytest.raises(ValueError, match=r"v: dtype torch.float32 differs from q's, torch.float16"):
        attention(q, k, v.float())
    with pytest.raises(ValueError, match=r"k is on meta, q on cpu; all tensors must be on one device"):
        attention(q, k.to("meta"), v)
    with pytest.raises(ValueError, match=r"q: dtype torch.int64 is not allowed; allowed: floating point"):
        attention(q.long(), k, v)
    eight_bits = q.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"q: dtype torch.float8_e4m3fn is not allowed; allowed: floating point of 16"):
        attention(eight_bits, eight_bits, eight_bits)
    with pytest.raises(ValueError, match=r"q: layout torch.sparse_coo is not allowed; allowed: dense tensors"):
        attention(*[q.float().to_sparse()] * 3)
    with pytest.raises(TypeError, match=r"k: expected a torch.Tensor, got list"):
        attention(q, [1, 2], v)
    with pytest.raises(
        ValueError, match=r"q: dtype torch.float32 is not allowed; allowed: torch.float16, torch.bfloat16"
    ):
        attention(q.float(), k.float(), v.float(), backend="simulator")
    with pytest.raises(ValueError, match=r"backend: None does not compute NumPy arrays; allowed: 'simulator'"):
        attention(*(x.detach().numpy() for x in (q, k, v)))


def test_the_module_is_there_without_pytorch():
    """Arrays run on the simulator; a tensor's absence is explained."""
    program = """
import subprocess
import sys
sys.modules["torch"] = None
import numpy as np
from flashwright.attention import attention
q = np.ones((1, 1, 4, 32), np.float16)
assert (attention(q, q, q, backend="simulator") == 1).all()
try:
    attention([1], [2], [3])
except RuntimeError as error:
    assert "pip install 'flashwright[torch]'" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="overloads can be listed from Python 3.11 on")
def test_the_types_of_attention_have_all_of_its_arguments():
    overloads = typing.get_overloads(attention)
    assert len(overloads) == 3
    for overload in overloads:
        assert list(inspect.signature(overload).parameters) == list(inspect.signature(attention).parameters)


@pytest.mark.parametrize(
    ("options", "what_is_said"),
    [
        ({"window": {3: 4}}, r"window: \{3: 4\} is not allowed; allowed: None, or a pair"),
        ({"causal": [True]}, r"causal: \[True\] is not allowed"),
        ({"scale": [1.0]}, r"scale: \[1.0\] is not allowed"),
    ],
)
def test_arguments_without_a_hash_are_refused_by_name_on_the_way_to_a_launch(monkeypatch, options, what_is_said):
    monkeypatch.setattr(sys.modules["flashwright.attention"], "way_of_call", lambda *tensors: LAUNCHED)
    q = torch.zeros(1, 1, 8, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=what_is_said):
        attention(q, q, q, **options)


# --- Wide heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_view", (True, False))
def test_latent_attention_is_decoded(is_view):
    torch.manual_seed(0)
    q, k = torch.randn(2, 16, 3, 576, dtype=torch.float64), torch.randn(2, 1, 40, 576, dtype=torch.float64)
    v = k[..., :512] if is_view else torch.randn(2, 1, 40, 512, dtype=torch.float64)
    out, lse = attention(q, k, v, causal=True, scale=192**-0.5, return_lse=True)
    mask = torch.ones(3, 40, dtype=torch.bool).tril(37)
    scores = (q @ k.mT * 192**-0.5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1).float())


@pytest.mark.parametrize(
    ("shapes", "options"),
    (
        (((1, 4, 1, 576), (1, 1, 9, 576), (1, 1, 9, 576)), {}),
        (((1, 4, 1, 576), (1, 1, 9, 576), (1, 1, 9, 1032)), {}),
        (((1, 4, 1, 576), (1, 1, 9, 576), (1, 1, 8, 512)), {}),
        (((1, 4, 1, 576), (1, 3, 9, 576), (1, 3, 9, 512)), {}),
        (((1, 4, 1, 576), (1, 1, 9, 576), (1, 1, 9, 512)), {"family": "ampere"}),
        (((1, 4, 1, 576), (1, 1, 9, 576), (1, 1, 9, 512)), {"row_invariant": True}),
    ),
)
def test_other_wide_heads_are_refused(shapes, options):
    with pytest.raises(ValueError, match=r"head_dim 576 is not allowed|same shape"):
        attention(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes), **options)
