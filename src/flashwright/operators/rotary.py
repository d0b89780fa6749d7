"""Rotary positions of queries and new keys, where no kernel rotates them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashwright.runtime.decode_plans import NewRows

if TYPE_CHECKING:
    import torch


def rotated(x: torch.Tensor, positions: Any, new: NewRows) -> torch.Tensor:
    """(heads, rows, head_dim), whose first columns are rotated for the rows' positions."""
    import torch

    assert new.cosines is not None and new.sines is not None
    half = new.cosines.shape[1]
    positions = positions.clamp(0, new.cosines.shape[0] - 1)
    cosines, sines = new.cosines[positions].float(), new.sines[positions].float()
    rotary, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if new.interleaved:
        first, second = rotary[..., ::2], rotary[..., 1::2]
        turned = torch.stack((first * cosines - second * sines, second * cosines + first * sines), -1).flatten(-2)
    else:
        first, second = rotary[..., :half], rotary[..., half:]
        turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
