"""Problems for attention, drawn at random or written down, and the truth about them in float64."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import torch


class Truth(NamedTuple):
    out: Any
    lse: Any


def naive(
    q: Any, k: Any, v: Any, *, causal: Any = False, window: Any = None, scale: Any = None, softcap: float = 0.0
) -> Truth:
    """Every score, one by one where it matters: which keys a row sees is asked for each pair."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    shift = 0 if causal == "top-left" else keys - rows
    left, right = (math.inf if side in (None, -1) else side for side in window or (None, None))
    right = 0 if causal else right
    visible = [[i + shift - left <= j <= i + shift + right for j in range(keys)] for i in range(rows)]
    mask = torch.tensor(visible, dtype=torch.bool).view(rows, keys)
    scores = scores.masked_fill(~mask, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1))
    return Truth(weights @ v, lse)


def tensors(
    q_shape: tuple[int, ...], kv_shape: tuple[int, ...], dtype: Any = None, seed: int = 0, requires_grad: bool = False
) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or torch.float64)
        for shape in (q_shape, kv_shape, kv_shape)
    )
    return tuple(x.requires_grad_(requires_grad) for x in (q, k, v))  # type: ignore[return-value]


class Case(NamedTuple):
    """A problem; the same kind that the GPU tests draw."""

    dtype: str
    head_dim: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    options: dict[str, Any]
    layout: str

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in self.options.items()) or "full"
        shape = f"{self.heads[0]}:{self.heads[1]}x{self.lengths[0]}:{self.lengths[1]}x{self.head_dim}"
        return f"{self.dtype}-{shape}-{self.layout}-{options}".replace(" ", "")


HEAD_DIMS = (32, 40, 64, 72, 96, 128, 160, 192, 256)
LAYOUTS = ("heads first", "rows first", "part of qkv", "padded rows", "transposed")


def random_case(seed: int, longest: int) -> Case:
    draw = random.Random(seed)
    options: dict[str, Any] = {}
    match draw.randrange(5):
        case 0:
            options["causal"] = draw.choice([True, "top-left"])
        case 1:
            options["window"] = (draw.randrange(-1, longest), draw.randrange(-1, longest))
        case 2:
            options |= {"causal": True, "window": (draw.randrange(longest), -1)}
        case 3:
            options["causal"] = True
    if draw.random() < 0.25:
        options["softcap"] = draw.choice([1.0, 20.0])
    if draw.random() < 0.25:
        options["scale"] = draw.choice([0.02, 0.5])
    rows = draw.randint(1, longest)
    return Case(
        draw.choice(["float16", "bfloat16"]),
        HEAD_DIMS[seed % len(HEAD_DIMS)],
        draw.choice([(1, 1), (2, 2), (2, 1), (4, 2), (3, 1)]),
        (rows, draw.choice([rows, draw.randint(1, longest)])),
        options,
        draw.choice(LAYOUTS),
    )


def laid_out(x: Any, layout: str) -> Any:
    """The same values with other strides."""
    match layout:
        case "rows first":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "part of qkv":
            wide = torch.full((*x.shape[:3], 3, x.shape[3]), math.nan, dtype=x.dtype, device=x.device)
            wide[..., 1, :] = x
            return wide[..., 1, :]
        case "padded rows":  # not a multiple of 16 bytes: has to be copied
            wide = torch.full((*x.shape[:3], x.shape[3] + 3), math.nan, dtype=x.dtype, device=x.device)
            wide[..., :-3] = x
            return wide[..., :-3]
        case "transposed":
            return x.mT.contiguous().mT
    return x


def relative_error(actual: Any, expected: Any) -> float:
    (error,) = relative_errors(expected, actual)
    return error


def relative_errors(expected: Any, *actual: Any) -> list[float]:
    """Of several results. From a GPU they come together: on one that is shared, waiting for it takes longest."""
    norms = [expected.norm(), *((x.double() - expected).norm() for x in actual)]
    norm, *errors = torch.stack([x.double() for x in norms]).tolist()
    return [error / norm for error in errors] if norm else errors


ERROR_BOUNDS = {"float16": 1e-3, "bfloat16": 8e-3}
"""Relative, in the Frobenius norm: a few roundings of P and O to the dtype."""
