"""What a kernel computes, apart from how: the part of attention's meaning that is fixed at compile time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionVariant:
    """A feature that is off costs nothing: its code does not exist in the kernel."""

    returns_lse: bool = False
    """Also write the log-sum-exp of each row's scaled scores."""
    masks_left: bool = False
    """Keys too far to the left of a row are masked."""
    masks_right: bool = False
    """Keys too far to the right of a row are masked: causal, with a window of 0."""
    softcaps: bool = False
    """Scores pass through a scaled hyperbolic tangent."""
    grouped_heads: bool = False
    """Several heads of Q share one of K and V."""
    variable_lengths: bool = False
    """Sequences of different lengths are packed one after the other."""
    accumulates: bool = False
    """Results are added to what fp32 tensors hold: gradients of parts of a problem, or outputs of parts of the keys,
    weighted by their log-sum-exps."""
    head_dim: int = 0
    """Columns of the tensors when they are fewer than the config's d_head; 0: as many."""
    value_head_dim: int = 0
    """Columns of V and O when they are not as many as those of Q and K; 0: as many. Decode kernels know it."""

    @property
    def pads_columns(self) -> bool:
        return self.head_dim != 0


PLAIN = AttentionVariant()
