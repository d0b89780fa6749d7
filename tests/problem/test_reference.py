"""The float64 definitions: gradients are those of the forward definition, by differences."""

from __future__ import annotations

import numpy as np
import pytest

from flashwright.problem.reference import reference_backward, reference_forward
from flashwright.problem.window import FULL, Window

STEP = 1e-6


@pytest.mark.parametrize(
    ("window", "softcap", "scale"),
    [
        (FULL, 0.0, None),
        (Window(None, 0), 2.0, None),
        (Window(1, 0, bottom_right=False), 0.0, 0.3),
        (Window(0, -4), 0, 1),
    ],
)
def test_gradients_are_what_differences_of_the_output_say(window: Window, softcap: float, scale: float | None) -> None:
    rng = np.random.default_rng(0)
    do, q = rng.standard_normal((2, 1, 4, 5, 3))
    k, v = rng.standard_normal((2, 1, 2, 6, 3))
    options = {"window": window, "softcap": softcap, "scale": scale}
    inputs = {"q": q, "k": k, "v": v}
    gradients = dict(zip("qkv", reference_backward(do, q, k, v, **options), strict=True))
    for name, array in inputs.items():
        assert gradients[name].shape == array.shape
        place = tuple(rng.integers(0, size) for size in array.shape)
        changes = []
        for sign in (1, -1):
            moved = array.copy()
            moved[place] += sign * STEP
            changes.append(float((do * reference_forward(**(inputs | {name: moved}), **options)[0]).sum()))
        expected = (changes[0] - changes[1]) / (2 * STEP)
        assert gradients[name][place] == pytest.approx(expected, rel=1e-5, abs=1e-7)
