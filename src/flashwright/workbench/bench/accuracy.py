"""The error of an output against float64, on a sample whose size does not depend on the length."""

from __future__ import annotations

import math
from typing import Any

from flashwright.problem.window import FULL, Window
from flashwright.runtime.reference import visible_keys
from flashwright.workbench.bench.peers import Inputs

SAMPLED_ROWS = 256


def sampled_relative_error(out: Any, inputs: Inputs) -> float:
    """‖out − float64‖ / ‖float64‖ over rows in the middle of the last sequence's last head.

    In the middle a causal mask hides some keys and leaves others.
    """
    import torch

    if out.shape != inputs.q.shape:
        raise ValueError(f"the output has the shape {tuple(out.shape)}, but q has {tuple(inputs.q.shape)}")
    length = inputs.q.shape[2]
    first = max(0, (length - SAMPLED_ROWS) // 2)
    rows = slice(first, min(length, first + SAMPLED_ROWS))
    q, k, v = inputs.q[-1, -1, rows].double(), inputs.k[-1, -1].double(), inputs.v[-1, -1].double()
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    window = Window(right=0) if inputs.causal else FULL
    visible = visible_keys(window, length, k.shape[0], rows=rows, device=q.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    expected = torch.softmax(scores, dim=-1) @ v
    difference = out[-1, -1, rows].double() - expected
    return float(torch.linalg.norm(difference) / torch.linalg.norm(expected))
