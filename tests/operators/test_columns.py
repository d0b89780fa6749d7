"""Values of another head dimension than queries and keys: computed on padded copies, the padding cut off again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashwright import attention, flash_attn_func, flash_attn_varlen_func
from flashwright.operators.columns import kernel_columns, with_columns

SIZES = ((24, 16), (16, 24), (192, 128))


def some(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_pytorch(q: Any, k: Any, v: Any) -> Any:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize(("head_dim", "value_head_dim"), SIZES)
def test_values_may_have_another_head_dimension(head_dim, value_head_dim):
    q, k, v = some(1, 2, 3, head_dim), some(1, 2, 5, head_dim, seed=1), some(1, 2, 5, value_head_dim, seed=2)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected = by_pytorch(*inputs)
    out, lse = attention(*inputs, causal=True, return_lse=True)
    torch.testing.assert_close(out, expected)
    assert lse.shape == (1, 2, 3)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    heads_last = [x.detach().transpose(1, 2) for x in inputs]
    torch.testing.assert_close(flash_attn_func(*heads_last, causal=True), expected.transpose(1, 2))
    starts = [torch.tensor([0, x.shape[1]], dtype=torch.int32) for x in heads_last[:2]]
    packed = flash_attn_varlen_func(*(x[0] for x in heads_last), *starts, 3, 5, causal=True)
    torch.testing.assert_close(packed, expected[0].transpose(0, 1))


def test_kernels_compute_such_values_on_the_simulator():
    q, k = (some(1, 1, 4, 24, seed=seed, dtype=torch.float16) for seed in (1, 2))
    v = some(1, 1, 4, 16, seed=3, dtype=torch.float16)
    out = attention(q, k, v, backend="simulator")
    torch.testing.assert_close(out.double(), attention(q.double(), k.double(), v.double()), rtol=2e-3, atol=2e-3)
    arrays = attention(*(x.numpy() for x in (q, k, v)), backend="simulator")
    np.testing.assert_array_equal(arrays, out.numpy())


def test_columns_are_padded_to_a_multiple_of_eight():
    assert [kernel_columns(*sizes) for sizes in ((59, 59), (192, 128), (64, 72))] == [64, 192, 72]
    x = some(2, 3)
    assert with_columns(x, 3) is x


def test_head_dimensions_of_queries_and_keys_must_agree():
    q, k, v = some(1, 2, 3, 16), some(1, 2, 3, 24), some(1, 2, 3, 24)
    with pytest.raises(ValueError, match="k: head_dim is 24, but q's is 16"):
        attention(q, k, v)
    with pytest.raises(ValueError, match="k: head_dim is 24, but q's is 16"):
        flash_attn_func(q, k, v)
