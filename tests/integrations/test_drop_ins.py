"""Attention as PyTorch's operators, as its SDPA, and as the `flash_attn` package: on CPU tensors."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attention_cases import naive, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from flashwright import integrations
from flashwright.attention import attention
from flashwright.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from flashwright.integrations.kv_cache import flash_attn_with_kvcache
from flashwright.integrations.sdpa import scaled_dot_product_attention
from flashwright.operators import torch_ops
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import FULL, Window

OPS = torch.ops.flashwright


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(integrations, "_said", set())


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


# --- Operators -------------------------------------------------------------------------------------------------------

WINDOWS = [FULL, Window(None, 0), Window(3, 0, False), Window(2, 4)]


def dense_arguments(window: Window, dtype: Any, softcap: float = 0.0, with_lse: bool = True) -> tuple[Any, ...]:
    q, k, v = tensors((2, 4, 7, 16), (2, 2, 9, 16), dtype, requires_grad=True)
    return (q, k, v, None, window.left, window.right, window.bottom_right, softcap, with_lse, "", False)


def packed_arguments(window: Window, dtype: Any, softcap: float = 0.0, with_lse: bool = True) -> tuple[Any, ...]:
    q, k, v = tensors((11, 4, 16), (13, 2, 16), dtype, requires_grad=True)
    starts = int32(0, 4, 4, 11), int32(0, 6, 8, 13)
    return (q, k, v, *starts, 7, 6, 0.3, window.left, window.right, True, softcap, with_lse, "", False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_lse", [True, False])
def test_pytorch_finds_nothing_wrong_with_the_operators(dtype, with_lse):
    dense = dense_arguments(Window(3, 0, False), dtype, 2.0, with_lse)
    torch.library.opcheck(OPS.attention_forward.default, dense)
    torch.library.opcheck(OPS.attention_varlen_forward.default, packed_arguments(Window(3, 0), dtype, 2.0, with_lse))


def test_pytorch_finds_nothing_wrong_with_the_backward_operators():
    q, k, v, *_ = (x.detach() if isinstance(x, torch.Tensor) else x for x in dense_arguments(FULL, torch.float64))
    out, lse = attention(q, k, v, return_lse=True)
    arguments = (torch.ones_like(out), None, q, k, v, out, lse.float(), None, 2, 0, True, 0.0, True, "", False)
    torch.library.opcheck(OPS.attention_backward.default, arguments)
    q, k, v, *starts = (
        x.detach() if isinstance(x, torch.Tensor) else x for x in packed_arguments(FULL, torch.float64)[:7]
    )
    out, lse = OPS.attention_varlen_forward(q, k, v, *starts, None, None, 0, True, 0.0, True, "", False)
    arguments = (torch.ones_like(out), None, q, k, v, out, lse, *starts, None, None, 0, True, 0.0, True, "", False)
    torch.library.opcheck(OPS.attention_varlen_backward.default, arguments)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("with_lse", [True, False])
def test_the_operators_gradients_are_those_of_the_reference(window, softcap, with_lse):
    arguments = dense_arguments(window, torch.float64, softcap, with_lse)
    q, k, v = arguments[:3]
    causal = {None: False, 0: True}.get(window.right, False)
    options = {"causal": causal and ("bottom-right" if window.bottom_right else "top-left"), "softcap": softcap}
    expected, expected_lse = attention(q, k, v, **options, window=(window.left, window.right), return_lse=True)
    out, lse = OPS.attention_forward(*arguments)
    torch.testing.assert_close(out, expected)
    loss, expected_loss = out.square().sum(), expected.square().sum()
    if with_lse:  # gradients flow from the log-sum-exp too
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
        loss, expected_loss = loss + lse.sin().sum(), expected_loss + expected_lse.sin().sum()
    for a, b in zip(torch.autograd.grad(loss, (q, k, v)), torch.autograd.grad(expected_loss, (q, k, v)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["heads first", "rows first", "part of qkv", "transposed"])
def test_the_fake_output_has_the_strides_of_the_real_one(layout):
    from attention_cases import laid_out

    q, k, v = (laid_out(x, layout) for x in tensors((2, 4, 7, 16), (2, 4, 7, 16), torch.bfloat16))
    real = OPS.attention_forward(q, k, v, None, None, None, True, 0.0, True, "", False)
    with FakeTensorMode() as mode:
        fake = OPS.attention_forward(
            *(mode.from_tensor(x) for x in (q, k, v)), None, None, None, True, 0.0, True, "", False
        )
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_fake_cuda_tensors_go_through_the_operator_without_a_gpu():
    with FakeTensorMode():
        q = torch.empty(2, 8, 100, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(2, 2, 300, 64, device="cuda", dtype=torch.bfloat16)
        out, lse = attention(q, k, k, causal=True, return_lse=True)
        assert (out.shape, out.device.type, lse.shape) == (q.shape, "cuda", q.shape[:3])
        assert flash_attn_func(q, q, q).shape == q.shape
        with pytest.raises(ValueError, match=r"q: dtype torch.float32 is not allowed"):
            attention(q.float(), k.float(), k.float())


def compiled(function: Any, dynamic: bool = False) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_functions_have_no_graph_breaks(dynamic):
    def model(q, k, v):
        out, lse = attention(q, k, v, causal=True, window=(4, -1), softcap=3.0, return_lse=True)
        return out + scaled_dot_product_attention(q, k, v, is_causal=True) + lse.unsqueeze(-1)

    q, k, v = tensors((2, 4, 6, 16), (2, 4, 6, 16), torch.float32, requires_grad=True)
    expected = model(q, k, v)
    actual = compiled(model, dynamic)(q, k, v)
    torch.testing.assert_close(actual, expected)
    for a, b in zip(
        torch.autograd.grad(actual.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_compiled_operators_have_no_graph_breaks():
    def dense(q, k, v):
        return torch_ops.forward(q, k, v, torch_ops.Request(AttentionOptions(Window(3, 0))))[0] * 2

    def packed(q, k, v, starts):
        return flash_attn_varlen_func(q, k, v, starts, starts, 5, 5, causal=True) * 2

    q, k, v = tensors((2, 4, 6, 16), (2, 2, 6, 16), torch.float32, requires_grad=True)
    packed_qkv = tensors((9, 4, 16), (9, 2, 16), torch.float32, requires_grad=True)
    for function, arguments in ((dense, (q, k, v)), (packed, (*packed_qkv, int32(0, 4, 9)))):
        expected, actual = function(*arguments), compiled(function)(*arguments)
        torch.testing.assert_close(actual, expected)
        inputs = arguments[:3]
        for a, b in zip(
            torch.autograd.grad(actual.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
        ):
            torch.testing.assert_close(a, b)


def test_inference_mode_and_autocast():
    q, k, v = tensors((1, 2, 5, 16), (1, 2, 5, 16), torch.float32)
    with torch.inference_mode():
        assert attention(q, k, v).is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        assert functional.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16


# --- SDPA ------------------------------------------------------------------------------------------------------------


def test_sdpa_has_pytorchs_parameters():
    names = list(inspect.signature(scaled_dot_product_attention).parameters)
    assert names == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3, "is_causal": True}], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (4, 9), (9, 4)])
@pytest.mark.parametrize("dimensions", [3, 4])
def test_sdpa_computes_what_pytorchs_does(options, rows, keys, dimensions):
    shape = (2, 3)[4 - dimensions :]
    q, k, v = tensors((*shape, rows, 16), (*shape, keys, 16), requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = scaled_dot_product_attention(q, k, v, **options)
    expected = functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (actual, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_sdpa_shares_heads_only_when_asked_to():
    q, k, v = tensors((2, 6, 5, 16), (2, 2, 5, 16))
    expected = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, enable_gqa=True), expected)
    with pytest.warns(UserWarning, match="broadcasting"), pytest.raises(RuntimeError):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        (None, {"attn_mask": torch.tril(torch.ones(5, 5, dtype=torch.bool))}, "attn_mask is not supported"),
        (None, {"dropout_p": 1e-9}, "dropout_p > 0 is not supported"),
        (None, {"scale": -0.5}, "scale -0.5 is not supported"),
        (lambda x: x[0, 0], {}, "only dense tensors of 3 or 4 dimensions"),
        (lambda x: x[..., :15], {}, "head dimensions other than multiples of 8 up to 256"),
    ],
)
def test_sdpa_hands_the_rest_to_pytorch_and_says_so_once(change, options, why):
    q, k, v = tensors((2, 3, 5, 16), (2, 3, 5, 16))
    if change is not None:
        q, k, v = (change(x) for x in (q, k, v))
    with pytest.warns(UserWarning, match=f"{why}.*; PyTorch's own computes this"):
        actual = scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(actual, functional.scaled_dot_product_attention(q, k, v, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaled_dot_product_attention(q, k, v, **options)


# --- flash_attn ------------------------------------------------------------------------------------------------------

COMMON = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic"]
STARTS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (flash_attn_func, ["q", "k", "v", *COMMON, "return_attn_probs"]),
        (flash_attn_qkvpacked_func, ["qkv", *COMMON, "return_attn_probs"]),
        (flash_attn_kvpacked_func, ["q", "kv", *COMMON, "return_attn_probs"]),
        (flash_attn_varlen_func, ["q", "k", "v", *STARTS, *COMMON, "return_attn_probs", "block_table"]),
    ],
)
def test_the_functions_have_the_parameters_of_flash_attn(function, parameters):
    """What is theirs alone can only be given by name."""
    found = inspect.signature(function).parameters.values()
    assert [each.name for each in found if each.kind is not each.KEYWORD_ONLY] == parameters


def rows_first(truth: Any) -> Any:
    return truth.out.transpose(1, 2)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}, {"softcap": 4.0}], ids=str)
def test_flash_attn_func_takes_rows_before_heads_and_aligns_bottom_right(options):
    q, k, v = tensors((2, 5, 4, 16), (2, 9, 2, 16))
    names = {"window_size": "window"}
    truth = naive(*(x.transpose(1, 2) for x in (q, k, v)), **{names.get(n, n): o for n, o in options.items()})
    torch.testing.assert_close(flash_attn_func(q, k, v, **options), rows_first(truth))
    out, lse, nothing = flash_attn_func(q, k, v, **options, return_attn_probs=True, deterministic=True)
    torch.testing.assert_close(out, rows_first(truth))
    torch.testing.assert_close(lse, truth.lse)
    assert nothing.numel() == 0


@pytest.mark.parametrize(
    "window", (torch.tensor([3, 1]), np.array([3, 1]), (np.int64(3), np.int32(1)), [torch.tensor(3), torch.tensor(1)])
)
def test_windows_may_be_tensors_and_numbers_of_numpy(window):
    q, k, v = tensors((2, 5, 4, 16), (2, 9, 2, 16))
    expected = flash_attn_func(q, k, v, window_size=(3, 1))
    assert torch.equal(flash_attn_func(q, k, v, window_size=window), expected)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, window_size=window), expected)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    starts = [torch.arange(3, dtype=torch.int32) * rows for rows in (5, 9)]
    out = flash_attn_varlen_func(*packed, *starts, 5, 9, window_size=window)
    torch.testing.assert_close(out.view_as(q), expected)


def test_packed_tensors_are_taken_apart():
    q, k, v = tensors((2, 5, 4, 16), (2, 5, 4, 16), requires_grad=True)
    expected = flash_attn_func(q, k, v, causal=True)
    qkv, kv = torch.stack((q, k, v), dim=2), torch.stack((k, v), dim=2)
    torch.testing.assert_close(flash_attn_qkvpacked_func(qkv, causal=True), expected)
    torch.testing.assert_close(flash_attn_kvpacked_func(q, kv, causal=True), expected)
    with pytest.raises(ValueError, match=r"qkv: shape \(2, 5, 2, 4, 16\) is not allowed"):
        flash_attn_qkvpacked_func(kv)
    with pytest.raises(ValueError, match=r"kv: shape \(2, 5, 3, 4, 16\) is not allowed"):
        flash_attn_kvpacked_func(q, qkv)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_do_not_see_each_other(causal):
    q, k, v = tensors((11, 4, 16), (13, 2, 16), requires_grad=True)
    q_starts, k_starts = int32(0, 4, 4, 11), int32(0, 6, 8, 13)
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, q_starts, k_starts, 7, 6, causal=causal, softcap=3.0, return_attn_probs=True
    )
    assert (out.shape, lse.shape) == (q.shape, (4, 11))
    parts, lses = [], []
    for b in range(3):
        rows, keys = slice(q_starts[b], q_starts[b + 1]), slice(k_starts[b], k_starts[b + 1])
        if rows.start == rows.stop:
            continue
        part = [x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys])]
        one, one_lse = attention(*part, causal=causal, softcap=3.0, return_lse=True)
        parts.append(one[0].transpose(0, 1))
        lses.append(one_lse[0])
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, torch.cat(lses, dim=1).float())
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v)),
        torch.autograd.grad(expected.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_head_dimensions_that_are_no_multiple_of_8_are_padded_as_flash_attn_does():
    q, k, v = tensors((2, 5, 4, 13), (2, 9, 2, 13))
    truth = naive(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), rows_first(truth))
    starts = int32(0, 5), int32(0, 9)
    out = flash_attn_varlen_func(q[0], k[0], v[0], *starts, 5, 9, causal=True)
    torch.testing.assert_close(out, rows_first(truth)[0])


@pytest.mark.parametrize("name", ["dropout_p", "alibi_slopes"])
def test_what_is_not_supported_is_named(name):
    q, k, v = tensors((5, 4, 16), (5, 4, 16))
    value = 0.1 if name == "dropout_p" else torch.ones(4)
    with pytest.raises(NotImplementedError, match=f"{name}: not supported"):
        flash_attn_varlen_func(q, k, v, int32(0, 5), int32(0, 5), 5, 5, **{name: value})
    with pytest.raises(NotImplementedError, match=f"{name}: not supported"):
        flash_attn_func(q[None], k[None], v[None], **{name: value})


def test_wrong_starts_are_named():
    q, k, v = tensors((5, 4, 16), (5, 4, 16))
    with pytest.raises(ValueError, match=r"cu_seqlens_k: \(2,\) of torch.int64 is not allowed"):
        flash_attn_varlen_func(q, k, v, int32(0, 5), int32(0, 5).long(), 5, 5)
    with pytest.raises(ValueError, match="cu_seqlens_k: 3 entries, but cu_seqlens_q has 2"):
        flash_attn_varlen_func(q, k, v, int32(0, 5), int32(0, 2, 5), 5, 5)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: \[0, 4, 3\] is not allowed"):
        flash_attn_varlen_func(q, k, v, int32(0, 4, 3), int32(0, 2, 5), 5, 5)
    with pytest.raises(ValueError, match=r"q: shape \(1, 5, 4, 16\) is not allowed; allowed: \(rows, heads, head_dim"):
        flash_attn_varlen_func(q[None], k, v, int32(0, 5), int32(0, 5), 5, 5)
    assert math.isinf(
        flash_attn_varlen_func(q, k[:0], v[:0], int32(0, 5), int32(0, 0), 5, 0, return_attn_probs=True)[1].min()
    )


def test_errors_show_shapes_in_the_layout_of_the_function():
    q = torch.randn(5, 4, 16)
    with pytest.raises(
        ValueError, match=r"q: shape \(5, 4, 16\) is not allowed; allowed: \(batch, rows, heads, head_dim"
    ):
        flash_attn_func(q, q, q)
    q = torch.randn(1, 5, 4, 16)
    with pytest.raises(ValueError, match=r"head dimensions; got \(1, 3, 4, 16\) and \(1, 5, 4, 16\)"):
        flash_attn_func(q, q[:, :3], q)
    q = torch.randn(1, 5, 4, 300)
    with pytest.raises(ValueError, match=r"q: head_dim 300 is not allowed; allowed: 1 to 256"):
        flash_attn_func(q, q, q)


def test_arguments_of_another_type_are_named():
    q, starts = torch.randn(1, 5, 4, 16), torch.tensor([0, 5], dtype=torch.int32)
    rows = q[0]
    with pytest.raises(TypeError, match=r"q: expected a torch.Tensor, got ndarray"):
        flash_attn_func(q.numpy(), q, q)
    with pytest.raises(TypeError, match=r"kv: expected a torch.Tensor, got NoneType"):
        flash_attn_kvpacked_func(q, None)
    with pytest.raises(NotImplementedError, match=r"dropout_p: not supported"):
        flash_attn_func(q, q, q, dropout_p=None)
    for cu_seqlens in ([0, 5], starts.numpy()):
        with pytest.raises(
            TypeError, match=r"cu_seqlens_q: expected a (torch.Tensor|tensor of int32), got (list|ndarr)"
        ):
            flash_attn_varlen_func(rows, rows, rows, cu_seqlens, starts, 5, 5)
    with pytest.raises(TypeError, match=r"max_seqlen_q: expected an integer, got 'x'"):
        flash_attn_varlen_func(rows, rows, rows, starts, starts, "x", 5)


def test_pytorch_refuses_scores_that_are_no_numbers_and_dtypes_of_8_bits():
    q = torch.randn(1, 2, 8, 16)
    with pytest.warns(UserWarning, match="scale x is not supported"), pytest.raises(TypeError, match="must be float"):
        scaled_dot_product_attention(q, q, q, scale="x")
    q = q.to(torch.float8_e5m2)
    with pytest.warns(UserWarning, match="float8_e5m2 is not supported"), pytest.raises(RuntimeError):
        scaled_dot_product_attention(q, q, q)
