"""How far an output is from float64, on a sample of it that stays small at any length."""

from __future__ import annotations

import math
from typing import Any

from flashwright.bench.peers import Inputs
from flashwright.reference import visible_keys
from flashwright.variant import FULL, Window

SAMPLED_ROWS = 256


def sampled_relative_error(out: Any, inputs: Inputs) -> float:
    """‖out − float64‖ / ‖float64‖ over rows in the middle of the last sequence's last head.

    The middle, because there a causal mask cuts off some keys and leaves others.
    """
    import torch

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
