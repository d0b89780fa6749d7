"""The errors of an output and of gradients against float64, on a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flashwright.problem.window import FULL, Window
from flashwright.runtime.reference import visible_keys
from flashwright.workbench.bench.peers import Inputs

SAMPLED_ROWS = 256
ROWS_AT_ONCE = 1024
"""Of a head whose gradients are computed in float64."""


def sampled_relative_error(out: Any, inputs: Inputs) -> float:
    """‖out − float64‖ / ‖float64‖ over some rows in the middle of the last sequence's last head.

    In the middle a causal mask hides some keys and leaves others.
    """
    import torch

    if out.shape != inputs.q.shape:
        raise ValueError(f"the output has the shape {tuple(out.shape)}, but q has {tuple(inputs.q.shape)}")
    length = inputs.q.shape[2]
    first = max(0, (length - SAMPLED_ROWS) // 2)
    rows = slice(first, min(length, first + SAMPLED_ROWS))
    q, k, v = (x[-1, -1].detach().double() for x in (inputs.q[:, :, rows], inputs.k, inputs.v))
    expected = _probabilities(q, k, inputs.causal, length, rows) @ v
    difference = out[-1, -1, rows].double() - expected
    return float(torch.linalg.norm(difference) / torch.linalg.norm(expected))


def _probabilities(q: Any, k: Any, causal: bool, length: int, rows: slice) -> Any:
    """Of some rows of a sequence of that length."""
    import torch

    scores = q @ k.mT / math.sqrt(q.shape[-1])
    visible = visible_keys(Window(right=0) if causal else FULL, length, k.shape[0], rows=rows, device=q.device)
    return torch.softmax(scores if visible is None else scores.masked_fill(~visible, -math.inf), dim=-1)


def gradient_error(gradients: tuple[Any, Any, Any], inputs: Inputs) -> float:
    """The largest of dq, dk and dv, in the last sequence's last head of k and v.

    dq and dk are sums of P∘(dP − D), a difference whose terms may be far larger than itself where a row attends to one
    key. What rounding does to it goes with the terms: errors are relative to the larger of it and of the root of the
    sum of their squares, as roundings add up. The sum of P∘dP itself may vanish by chance.
    """
    import torch

    for name, gradient, like in zip(("dq", "dk", "dv"), gradients, (inputs.q, inputs.k, inputs.v), strict=True):
        if gradient.shape != like.shape:
            raise ValueError(f"{name} has the shape {tuple(gradient.shape)}, but its tensor has {tuple(like.shape)}")
    group = inputs.q.shape[1] // inputs.k.shape[1]
    k, v = (x[-1, -1].detach().double() for x in (inputs.k, inputs.v))
    dk, dv, dk_terms = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(k)
    errors = []
    for head in range(-group, 0):
        q, do = (x[-1, head].detach().double() for x in (inputs.q, inputs.do))
        dq, dq_terms = torch.zeros_like(q), torch.zeros_like(q)
        for first in range(0, q.shape[0], ROWS_AT_ONCE):
            rows = slice(first, min(q.shape[0], first + ROWS_AT_ONCE))
            P = _probabilities(q[rows], k, inputs.causal, q.shape[0], rows)
            P_dP = P * (do[rows] @ v.mT) / math.sqrt(k.shape[1])
            dS = P_dP - P * P_dP.sum(dim=-1, keepdim=True)
            dq[rows], dq_terms[rows] = dS @ k, (P_dP.square() @ k.square()).sqrt()
            dk += dS.mT @ q[rows]
            dk_terms += P_dP.square().mT @ q[rows].square()
            dv += P.mT @ do[rows]
        errors.append(_relative(gradients[0][-1, head], dq, dq_terms))
    errors += [_relative(gradients[1][-1, -1], dk, dk_terms.sqrt()), _relative(gradients[2][-1, -1], dv, dv)]
    return largest(errors)


def largest(errors: Sequence[float]) -> float:
    """NaN if any is."""
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _relative(found: Any, expected: Any, terms: Any) -> float:
    import torch

    scale = max(torch.linalg.norm(expected).item(), torch.linalg.norm(terms).item())
    difference: float = torch.linalg.norm(found.detach().double() - expected).item()
    if scale == 0:  # such as dk where q is 0
        return 0.0 if difference == 0 else math.inf
    return difference / scale
