"""What callers request beside tensors: windows, scales and caps, checked once and in one place."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashwright import AttentionOptions, Window
from flashwright.problem.options import as_window


@pytest.mark.parametrize(
    ("causal", "window", "expected"),
    [
        (False, None, Window()),
        (True, None, Window(right=0)),
        ("bottom-right", None, Window(right=0)),
        ("top-left", None, Window(right=0, bottom_right=False)),
        (False, (3, 5), Window(3, 5)),
        (False, [3, -1], Window(3, None)),
        (False, (None, 0), Window(None, 0)),
        (True, (3, 5), Window(3, 0)),
    ],
)
def test_causal_and_window_are_one_window(causal, window, expected):
    assert as_window(causal, window) == AttentionOptions.of(causal, window).window == expected


def test_numbers_of_numpy_are_numbers(recwarn):
    options = AttentionOptions.of(np.True_, (np.int64(3), np.int32(-1)), np.float32(0.5), np.float64(5))
    assert options == AttentionOptions(Window(3, 0), 0.5, 5.0)
    assert [type(value) for value in (options.window.left, options.scale, options.softcap)] == [int, float, float]
    assert AttentionOptions.of(False, np.array([3, -1])).window == Window(3, None)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"causal": "left"}, "causal: 'left' is not allowed; allowed: True, False, 'bottom-right', 'top-left'"),
        ({"causal": 2}, "causal: 2 is not allowed"),
        ({"causal": np.array([1, 0])}, r"causal: array\(\[1, 0\]\) is not allowed"),
        ({"window": 3}, r"window: 3 is not allowed; allowed: None, or a pair \(left, right\)"),
        ({"window": (1, 2, 3)}, "allowed: None, or a pair"),
        ({"window": "12"}, "allowed: None, or a pair"),
        ({"window": (-2, 0)}, "each side must be None, -1 .no limit. or an integer of at least 0"),
        ({"window": (0, 1.5)}, "each side must be"),
        ({"window": (True, 0)}, "each side must be"),
        ({"window": np.array([0.0, 1.0])}, "each side must be"),
        ({"window": np.zeros((2, 2), int)}, "each side must be"),
        ({"scale": 0.0}, "scale: 0.0 is not allowed; allowed: None .1/√head_dim., or a positive finite number"),
        ({"scale": -1.0}, "scale: -1.0"),
        ({"scale": 1e-60}, "scale: 1e-60"),
        ({"scale": math.inf}, "scale: inf"),
        ({"scale": "1"}, "scale: '1'"),
        ({"scale": np.float32(0)}, "scale: np.float32.0.0. is not allowed"),
        ({"scale": 10**400}, "scale: 1000"),
        ({"softcap": None}, "softcap: None is not allowed"),
        ({"softcap": "x"}, "softcap: 'x' is not allowed"),
        ({"softcap": -1.0}, "softcap: -1.0 is not allowed; allowed: 0 .none., or a positive finite number"),
        ({"softcap": math.nan}, "softcap: nan"),
        ({"softcap": 1e60}, "softcap: 1e[+]60"),
    ],
)
def test_what_is_not_attentions_is_refused_with_what_is(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionOptions.of(**arguments)


@given(st.integers(1, 256), st.none() | st.floats(1e-3, 1e3), st.floats(0.1, 100), st.floats(-50, 50))
def test_the_kernels_two_factors_give_the_capped_score(head_dim, scale, softcap, score):
    options = AttentionOptions(scale=scale, softcap=softcap)
    expected = softcap * math.tanh(score * options.scale_of(head_dim) / softcap)
    outer, inner = options.kernel_scales(head_dim)
    # As the kernel does: tanh(x) = 1 - 2/(exp2(2·log2(e)·x) + 1).
    exponential = 2 ** min(score * inner, 1000.0)
    assert outer * (1 - 2 / (exponential + 1)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_without_a_cap_scores_are_scaled_alone():
    assert AttentionOptions().kernel_scales(64) == (0.125, 0.0)
    assert AttentionOptions(scale=0.5).kernel_scales(64) == (0.5, 0.0)
