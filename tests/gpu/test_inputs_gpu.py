"""Inputs as users have them: of any alignment and strides, planned once; and what is wrong with them is raised."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from attention_cases import laid_out

from flashwright.attention import attention
from flashwright.integrations.flash_attn import flash_attn_func
from flashwright.runtime.call_kinds import CallKind

from .tools import assert_close_lse, assert_right, some, truth


def off_by_one_element(x: Any) -> Any:
    """The same values and strides, 2 bytes after an aligned address."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    moved = memory[1:].view(x.shape)
    moved.copy_(x)
    assert moved.data_ptr() % 16 == 2
    return moved


def odd_strides(x: Any) -> Any:
    """Rows of 3 elements more."""
    return laid_out(x, "padded rows")


def columns_apart(x: Any) -> Any:
    """The last dimension is not the contiguous one."""
    return laid_out(x, "transposed")


def every_other_column(x: Any) -> Any:
    wide = x.repeat_interleave(2, dim=-1)
    return wide[..., ::2]


UNALIGNED = [off_by_one_element, odd_strides, columns_apart, every_other_column]


@pytest.mark.parametrize("move", UNALIGNED)
@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_unaligned_inputs_are_right_on_every_call(family, move, which):
    """Among aligned calls of the same shapes and, off by one element, of the same strides."""
    aligned = some()
    moved = [move(x) if which in (name, "all") else x for name, x in zip("qkv", aligned, strict=True)]
    expected, expected_lse = truth(*aligned, {"causal": True})
    for _ in range(4):
        for problem in (moved, aligned):
            out, lse = attention(*problem, causal=True, return_lse=True, family=family)
            assert_right(out, expected)
            assert_close_lse(lse, expected_lse)


@pytest.mark.parametrize("move", UNALIGNED)
def test_unaligned_inputs_are_planned_once(family, move, monkeypatch):
    q, k, v = (move(x) for x in some())
    attention(q, k, v, family=family)
    plans: list[Any] = []
    arrange = CallKind._arrange

    def counted(*arguments: Any) -> Any:
        plans.append(arguments)
        return arrange(*arguments)

    monkeypatch.setattr(CallKind, "_arrange", counted)
    for _ in range(3):
        attention(q, k, v, family=family)
    assert plans == []


WRONG = {
    "heads": (lambda q, k, v: (q, k[:, :1].repeat(1, 3, 1, 1), v[:, :1].repeat(1, 3, 1, 1)), r"q has 4 heads, which"),
    "dtype of k": (lambda q, k, v: (q, k.half(), v), r"k: dtype torch.float16 differs from q's, torch.bfloat16"),
    "dtype of all": (lambda q, k, v: (q.float(), k.float(), v.float()), r"q: dtype torch.float32 is not allowed"),
    "integers": (lambda q, k, v: (q.int(), k.int(), v.int()), r"q: dtype torch.int32 is not allowed"),
    "lengths of k and v": (lambda q, k, v: (q, k, v[:, :, 1:]), r"k and v must have the same shape"),
    "batch": (lambda q, k, v: (q, k[:1], v[:1]), r"k: batch is 1, but q's is 2"),
    "head dimensions": (lambda q, k, v: (q[..., :32], k, v), r"k: head_dim is 64, but q's is 32"),
    "head dimension": (lambda q, k, v: (q[..., :60], k[..., :60], v[..., :60]), r"q: head_dim 60 is not allowed"),
    "dimensions": (lambda q, k, v: (q[0], k, v), r"q: shape \(4, 300, 64\) is not allowed"),
    "device": (lambda q, k, v: (q, k, v.cpu()), r"v is on cpu, q on cuda:0; all tensors must be on one device"),
}


@pytest.mark.parametrize(("spoil", "message"), WRONG.values(), ids=list(WRONG))
def test_what_is_wrong_is_raised_after_good_calls_of_the_same_kind(family, spoil, message):
    tensors = some()
    expected, _ = truth(*tensors, {})
    attention(*tensors, family=family)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            attention(*spoil(*tensors), family=family)
        assert_right(attention(*tensors, family=family), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": -1.0}, r"scale: -1.0 is not allowed"),
        ({"softcap": -3.0}, r"softcap: -3.0 is not allowed"),
        ({"window": (-2, 0)}, r"window: .* is not allowed"),
        ({"causal": "middle"}, r"causal: 'middle' is not allowed"),
        ({"family": "volta"}, r"family: 'volta' is not known"),
        ({"backend": "tpu"}, r"backend: 'tpu' is not known"),
        ({"config": "(FP16, 64, 64, 64, 4): load_0_0_0_tiles"}, r"computes FP16, but q is BF16"),
        ({"config": "(BF16, 32, 64, 64, 4): load_0_0_0_tiles"}, r"computes head dimensions up to 32, but q has 64"),
    ],
    ids=str,
)
def test_wrong_options_are_raised_after_good_calls(options, message):
    tensors = some()
    attention(*tensors)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            attention(*tensors, **options)


def test_wrong_tensors_of_the_drop_ins_are_raised_after_good_calls():
    q, k, v = (x.transpose(1, 2) for x in some())
    flash_attn_func(q, k, v)
    with pytest.raises(ValueError, match="q has 4 heads, which is not a multiple of the 3 heads"):
        flash_attn_func(q, k[:, :, :1].repeat(1, 1, 3, 1), v[:, :, :1].repeat(1, 1, 3, 1))
    with pytest.raises(ValueError, match=r"v: dtype torch.float16 differs"):
        flash_attn_func(q, k, v.half())
