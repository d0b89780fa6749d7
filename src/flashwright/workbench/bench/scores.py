"""Kinds of scores: inputs whose scores look like those of trained heads, or are hard for a kernel.

The speed of a kernel may depend on values: on how often a row's running maximum grows, and by how much. A kind is a
named change of standard normal q and k. It never touches scores themselves: a height that some keys have over others
is reached through coordinates of k that meet a constant in q, as a trained head does it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

NORMAL = "normal"
ALL = "all"

SINK_HEIGHT = 12.0
PEAK_HEIGHT = 64.0
"""A factor of 2⁹² in the exponential: more than a kernel can let grow in fp32 before it rescales."""
ONE_HOT_SCORE = 32.0
OUTLIERS_ONE_IN = 64
OUTLIER_HEIGHTS = (8.0, 24.0)
OUTLIER_ROW_FACTOR = 10.0
SMALLEST_SPREAD, LARGEST_SPREAD = 0.25, 10.0
SLOW, MEDIUM, FAST = 1 / 64, 1 / 8, 1.0
"""How much scores change from one key to the next."""
WAVE_HEIGHT, WAVE_KEYS = 16.0, 1024

HEIGHT_COORDINATES = 3
"""A height takes so many coordinates of k, each holding what rounding left of it in those before: 24 bits in bf16."""
HEIGHT_FACTOR = 16.0
"""q's value in these coordinates: at d_head 256, k holds a height itself, and fp16 heights up to 65,504."""


@dataclass(frozen=True)
class ScoreKind:
    """A way that scores look."""

    name: str
    meaning: str
    """What the scores look like, and where such scores come from."""
    change: Callable[[Any, Any, Any], None]
    """Changes standard normal q and k, (batch, heads, rows, d_head), in place; the third argument generates numbers."""


def score_inputs(
    kind: ScoreKind | str,
    *,
    batch: int,
    heads: int,
    q_length: int,
    d_head: int,
    dtype: Any,
    device: Any = "cpu",
    kv_heads: int | None = None,
    kv_length: int | None = None,
    seed: int = 0,
) -> tuple[Any, Any, Any]:
    """q, k and v of PyTorch's `dtype`, as (batch, heads, rows, d_head) views of tensors stored rows first.

    v is standard normal. The same arguments give the same values on the same kind of device.
    """
    import torch

    kind = score_kind(kind) if isinstance(kind, str) else kind
    kv_heads, kv_length = kv_heads or heads, kv_length or q_length
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn((batch, rows, n, d_head), dtype=dtype, device=device, generator=generator).transpose(1, 2)
        for rows, n in ((q_length, heads), (kv_length, kv_heads), (kv_length, kv_heads))
    )
    kind.change(q, k, generator)
    return q, k, v


# --- Spreads -------------------------------------------------------------------------------------------------------


def _spread(factor: float, q: Any, k: Any, generator: Any) -> None:
    if factor != 1:
        q.mul_(factor)


def _mixed_heads(q: Any, k: Any, generator: Any) -> None:
    q.mul_(head_spreads(q.shape[1], q.device).to(q.dtype).view(1, -1, 1, 1))


def head_spreads(heads: int, device: Any = None) -> Any:
    """The spread of each head's scores, from the smallest to the largest in equal ratios."""
    import torch

    places = torch.arange(heads, device=device) / (heads - 1) if heads > 1 else torch.full((1,), 0.5, device=device)
    return SMALLEST_SPREAD * (LARGEST_SPREAD / SMALLEST_SPREAD) ** places


def _outlier_rows(q: Any, k: Any, generator: Any) -> None:
    q.mul_(_places(q, generator).to(q.dtype).mul(OUTLIER_ROW_FACTOR - 1).add(1).unsqueeze(-1))


def _equal(q: Any, k: Any, generator: Any) -> None:
    q.zero_()


# --- Heights of keys -----------------------------------------------------------------------------------------------


def raise_keys(q: Any, k: Any, heights: Any) -> None:
    """Adds a height to the scores of each key, the same for all rows; `heights` is broadcast to (batch, heads, keys).

    The other coordinates keep the spread of the scores, which is 1 before and after.
    """
    import torch

    n, d_head = HEIGHT_COORDINATES, q.shape[-1]
    q[..., n:].mul_(math.sqrt(d_head / (d_head - n)))
    q[..., :n] = HEIGHT_FACTOR
    left = heights.to(torch.float64).expand(k.shape[:-1]) * (math.sqrt(d_head) / HEIGHT_FACTOR)
    for coordinate in range(n):
        k[..., coordinate] = left
        left = left - k[..., coordinate].double()


def _peak_at(key: int, height: float, q: Any, k: Any, generator: Any) -> None:
    import torch

    heights = torch.zeros(k.shape[2], device=k.device)
    heights[key] = height
    raise_keys(q, k, heights)


def _slope(per_key: float, q: Any, k: Any, generator: Any) -> None:
    raise_keys(q, k, slope_heights(per_key, k.shape[2], k.device))


def slope_heights(per_key: float, keys: int, device: Any = None) -> Any:
    """A line through zero at the middle key, which keeps the scores as small as they can be."""
    import torch

    return (torch.arange(keys, device=device, dtype=torch.float64) - (keys - 1) / 2) * per_key


def _waves(q: Any, k: Any, generator: Any) -> None:
    import torch

    places = torch.arange(k.shape[2], device=k.device, dtype=torch.float64)
    raise_keys(q, k, WAVE_HEIGHT * torch.sin(2 * math.pi / WAVE_KEYS * places))


def _outlier_keys(q: Any, k: Any, generator: Any) -> None:
    import torch

    low, high = OUTLIER_HEIGHTS
    heights = torch.rand(k.shape[:3], device=k.device, generator=generator) * (high - low) + low
    raise_keys(q, k, heights * _places(k, generator))


def _places(x: Any, generator: Any) -> Any:
    """Random rows of a tensor, one in 64: (batch, heads, rows) of bool."""
    import torch

    return torch.rand(x.shape[:3], device=x.device, generator=generator) < 1 / OUTLIERS_ONE_IN


# --- Rows that look for one key ------------------------------------------------------------------------------------


def _one_hot(q: Any, k: Any, generator: Any) -> None:
    import torch

    places = torch.rand(q.shape[:3], device=q.device, generator=generator)
    _look_for(q, k, (places * (own_keys(q, k) + 1)).long())


def _late_peak(q: Any, k: Any, generator: Any) -> None:
    _look_for(q, k, own_keys(q, k).expand(q.shape[:3]))
    _peak_at(-1, PEAK_HEIGHT, q, k, generator)


def own_keys(q: Any, k: Any) -> Any:
    """The last key that each row attends to under a causal mask aligned to the last row and key; at least the first."""
    import torch

    rows, keys = q.shape[2], k.shape[2]
    return (torch.arange(rows, device=q.device) + keys - rows).clamp(min=0)


def _look_for(q: Any, k: Any, targets: Any) -> None:
    """Each row's score of its target, (batch, heads, rows) of keys, is `ONE_HOT_SCORE`, and no other key's is larger.

    Keys get the same norm, so that a row that is a multiple of a key scores no other key higher.
    """
    import torch

    d_head = q.shape[-1]
    length = torch.linalg.vector_norm(k.float(), dim=-1, keepdim=True)
    k.copy_(k.float() / length * math.sqrt(d_head))
    of_heads = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    found = of_heads.gather(2, targets.unsqueeze(-1).expand(-1, -1, -1, d_head))
    q.copy_(found.float() * (ONE_HOT_SCORE / math.sqrt(d_head)))


# --- The list ------------------------------------------------------------------------------------------------------

KINDS = {
    kind.name: kind
    for kind in (
        ScoreKind(NORMAL, "standard normal q, k and v, as most benchmarks have them", partial(_spread, 1)),
        ScoreKind("normal-x2", "q × 2: scores with twice the spread of normal ones", partial(_spread, 2)),
        ScoreKind("normal-x4", "q × 4: heads that have learnt to tell keys apart", partial(_spread, 4)),
        ScoreKind("normal-x6", "q × 6: heads that attend to few keys", partial(_spread, 6)),
        ScoreKind("normal-x10", "q × 10: heads that attend to hardly more than one key", partial(_spread, 10)),
        ScoreKind(
            "sink",
            "the first key scores 12 above the rest: the first token of a text attracts attention",
            partial(_peak_at, 0, SINK_HEIGHT),
        ),
        ScoreKind(
            "early-peak",
            "the first key scores 64 above the rest: the largest score comes last if the last keys come first",
            partial(_peak_at, 0, PEAK_HEIGHT),
        ),
        ScoreKind(
            "late-peak",
            "a row's own key scores 32 and the last key about 64: with and without a causal mask the largest "
            "score comes last if the first keys come first",
            _late_peak,
        ),
        ScoreKind(
            "rising-slow", "scores rise by 1/64 a key: recent tokens matter more, as in ALiBi", partial(_slope, SLOW)
        ),
        ScoreKind("rising", "scores rise by 1/8 a key: a steep head of ALiBi", partial(_slope, MEDIUM)),
        ScoreKind("rising-fast", "scores rise by 1 a key: a head that sees its neighbours", partial(_slope, FAST)),
        ScoreKind(
            "falling-slow",
            "scores fall by 1/64 a key: early tokens matter more, such as instructions",
            partial(_slope, -SLOW),
        ),
        ScoreKind(
            "falling", "scores fall by 1/8 a key: a head that sees a prompt's beginning", partial(_slope, -MEDIUM)
        ),
        ScoreKind("falling-fast", "scores fall by 1 a key: a head that sees the first tokens", partial(_slope, -FAST)),
        ScoreKind("waves", "scores swing by ±16 every 1,024 keys: a slow rotary frequency that dominates", _waves),
        ScoreKind(
            "outlier-keys",
            "one key in 64, at random places, scores 8 to 24 above the rest: separators and rare words",
            _outlier_keys,
        ),
        ScoreKind(
            "outlier-rows",
            "one row in 64, at random places, has ten times the spread: single rows that spoil what others share",
            _outlier_rows,
        ),
        ScoreKind(
            "mixed-heads",
            "every head another spread, from 0.25 to 10: heads of one layer differ in how sharply they attend",
            _mixed_heads,
        ),
        ScoreKind(
            "equal", "q = 0: all scores are equal, as before training and in heads that are switched off", _equal
        ),
        ScoreKind(
            "one-hot", "each row attends nearly to one random key up to its own: heads that copy or look up", _one_hot
        ),
    )
}


def score_kind(name: str) -> ScoreKind:
    if name in KINDS:
        return KINDS[name]
    near = difflib.get_close_matches(name, KINDS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"scores: {name!r} is not known; {hint}allowed: {', '.join(KINDS)}, or {ALL}")


def chosen_scores(texts: Sequence[str]) -> tuple[str, ...]:
    """The kinds that texts name, by commas, each once; `all`: every kind."""
    names = [name.strip() for text in texts for name in text.split(",")]
    return tuple(dict.fromkeys(kind for name in names for kind in (KINDS if name == ALL else [score_kind(name).name])))
