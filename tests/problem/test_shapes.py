"""Shapes and element types of attention's tensors, and what it costs to compute them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashwright import DType
from flashwright.problem.dtypes import NUMPY_DTYPES
from flashwright.problem.flops import forward_flops
from flashwright.problem.shapes import check_shapes, is_empty


@pytest.mark.parametrize(
    ("q", "kv"),
    [
        ((2, 4, 10, 64), (2, 4, 20, 64)),
        ((2, 4, 10, 8), (2, 2, 20, 8)),
        ((70_000, 4, 1, 256), (70_000, 1, 1, 256)),
        ((0, 4, 10, 64), (0, 4, 10, 64)),
    ],
)
def test_shapes_of_attention_are_accepted(q, kv):
    check_shapes(q, kv, kv)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (
            (4, 10, 64),
            (2, 4, 10, 64),
            (2, 4, 10, 64),
            r"q: shape \(4, 10, 64\) is not allowed; allowed: \(batch",
        ),
        ((2, 4, 10, 64), (2, 4, 10, 64), (2, 4, 11, 64), "k and v must have the same shape"),
        ((2, 4, 10, 64), (3, 4, 10, 64), (3, 4, 10, 64), "k: batch is 3, but q's is 2"),
        ((2, 4, 10, 64), (2, 4, 10, 32), (2, 4, 10, 32), "k: head_dim is 32, but q's is 64"),
        ((2, 4, 10, 60), (2, 4, 10, 60), (2, 4, 10, 60), "q: head_dim 60 is not allowed; allowed: multiples of 8"),
        ((2, 4, 10, 264), (2, 4, 10, 264), (2, 4, 10, 264), "from 8 to 256"),
        ((2, 4, 10, 64), (2, 3, 10, 64), (2, 3, 10, 64), "q has 4 heads, which is not a multiple of the 3 heads of k"),
        ((2, 4, 10, 64), (2, 0, 10, 64), (2, 0, 10, 64), "not a multiple of the 0 heads"),
    ],
)
def test_other_shapes_are_refused_with_both_sides(q, k, v, message):
    with pytest.raises(ValueError, match=message):
        check_shapes(q, k, v)


@pytest.mark.parametrize(
    ("q", "k", "empty"),
    [
        ((2, 4, 10, 64), (2, 4, 10, 64), False),
        ((2, 4, 0, 64), (2, 4, 10, 64), True),
        ((2, 4, 10, 64), (2, 4, 0, 64), True),
    ],
)
def test_tensors_without_a_row_or_a_key_are_empty(q, k, empty):
    assert is_empty(q, k) is empty


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("FP16", "float16", "torch.float16", "half", 5, DType.FP16), DType.FP16),
        (("BF16", " bfloat16 ", "torch.bfloat16", 15, DType.BF16), DType.BF16),
    ],
)
def test_an_element_type_has_many_names(names, dtype):
    assert {DType.parse(name) for name in names} == {dtype}


@pytest.mark.parametrize("name", ["fp8", "", 7, True, None])
def test_another_element_type_is_refused(name):
    with pytest.raises(ValueError, match="is not a known element type; allowed: FP16, BF16"):
        DType.parse(name)


def test_element_types_are_numpys_of_two_bytes():
    assert {DType.FP16: np.dtype(np.float16), DType.BF16: np.dtype(ml_dtypes.bfloat16)} == NUMPY_DTYPES
    assert {dtype.itemsize for dtype in NUMPY_DTYPES.values()} == {2}


def test_the_products_of_a_forward_pass_are_two_of_two_operations_an_element():
    assert forward_flops(batch=1, heads=2, q_length=3, kv_length=5, d_head=8) == 2 * (2 * 3 * 5 * 8) * 2
