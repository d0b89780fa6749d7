"""What a caller requests of attention beside its tensors, as one value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from flashwright.problem.lengths import MAX_LENGTH
from flashwright.problem.window import FULL, Window

CAUSAL_ALIGNMENTS = {"bottom-right": True, "top-left": False}
UNLIMITED = -1
"""What `flash_attn` writes for a side of a window without a limit; None means the same here."""
LOG2_E = math.log2(math.e)
_ROUNDS_TO_ZERO, _ROUNDS_TO_INFINITY = 2.0**-150, (2 - 2.0**-24) * 2.0**127
"""Numbers between these two round to positive finite fp32."""


class AttentionOptions(NamedTuple):
    """What a call computes of its tensors: mask, scale and cap of the scores."""

    window: Window = FULL
    scale: float | None = None
    """What scores are multiplied by; None: 1/√head_dim."""
    softcap: float = 0.0
    """Scores s become softcap·tanh(s/softcap); 0: they stay as they are."""

    @classmethod
    def of(
        cls,
        causal: bool | str = False,
        window: Sequence[int | None] | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> AttentionOptions:
        """The options as `attention()` takes them, checked."""
        options = cls(as_window(causal, window), scale, softcap)
        options.check()
        # Numbers of other libraries are numbers too; kernels and operators take Python's.
        return options._replace(scale=None if scale is None else float(scale), softcap=float(softcap))

    def check(self) -> None:
        """Raises `ValueError` for numbers that are not attention's."""
        if self.scale is not None and not _is_positive_fp32(self.scale):
            raise ValueError(
                f"scale: {self.scale!r} is not allowed; allowed: None (1/√head_dim), or a positive finite number"
            )
        if not (isinstance(self.softcap, Real) and self.softcap == 0) and not _is_positive_fp32(self.softcap):
            raise ValueError(
                f"softcap: {self.softcap!r} is not allowed; allowed: 0 (none), or a positive finite number"
            )

        for name in ("left", "right"):
            value = getattr(self.window, name)
            if value is not None and not value >= -MAX_LENGTH:
                raise ValueError(f"window.{name}: {value} is not allowed; allowed: None, or a number of keys")

    def scale_of(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def kernel_scales(self, head_dim: int) -> tuple[float, float]:
        """The kernel's factors of the scores: in the softmax, and inside the soft cap."""
        scale = self.scale_of(head_dim)
        if self.softcap == 0:
            return scale, 0.0
        # softcap · tanh(score · scale / softcap), with tanh(x) computed from exp2(2·log2(e)·x).
        return self.softcap, 2 * LOG2_E * scale / self.softcap


def _is_positive_fp32(value: Any) -> bool:
    """Whether a number is positive and finite also when it is rounded to fp32, as the kernel gets it."""
    if not isinstance(value, Real):
        return False
    # An integer may be too large for a float; a NumPy number compares in a precision of its own.
    number = value if isinstance(value, int) else float(value)
    return _ROUNDS_TO_ZERO < number < _ROUNDS_TO_INFINITY


def as_pair(window: Any) -> Any:
    """A window with sides that are numbers of Python, as a tuple, from a tensor or an array of two or a pair of numbers
    of other libraries. What is no pair is returned as it is, to be refused by its name."""
    if window.__class__ is tuple:
        for side in window:
            if side.__class__ is not int and side is not None:
                break
        else:
            return window  # as most calls have it: they are not to wait
    if hasattr(window, "tolist"):
        window = window.tolist()
    if not isinstance(window, list | tuple):
        return window
    return tuple(side.item() if getattr(side, "ndim", None) == 0 else side for side in window)


def as_window(causal: bool | str, window: Any) -> Window:
    """`causal` and `window` as one value."""
    bottom_right = True
    if isinstance(causal, str):
        if causal not in CAUSAL_ALIGNMENTS:
            raise ValueError(f"causal: {causal!r} is not allowed; allowed: True, False, {_listed(CAUSAL_ALIGNMENTS)}")
        bottom_right = CAUSAL_ALIGNMENTS[causal]
    elif not _is_truth_value(causal):
        raise ValueError(f"causal: {causal!r} is not allowed; allowed: True, False, {_listed(CAUSAL_ALIGNMENTS)}")
    if window is None:
        left = right = None
    else:
        window = as_pair(window)
        if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != 2:
            raise ValueError(f"window: {window!r} is not allowed; allowed: None, or a pair (left, right)")
        left, right = (_limit(window, side) for side in window)
    return Window(left, 0 if causal else right, bottom_right)


def _is_truth_value(value: Any) -> bool:
    """True, False, and what equals them; an array of several values does not."""
    try:
        return value in (True, False)
    except (ValueError, RuntimeError):  # as NumPy and PyTorch refuse to compare them
        return False


def _limit(window: Any, side: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, bool) or not isinstance(side, Integral) or side < UNLIMITED:
        raise ValueError(
            f"window: {window!r} is not allowed; each side must be None, -1 (no limit) or an integer of at least 0"
        )
    return None if side == UNLIMITED else int(side)


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
