"""Calls whose tensors no kernel can read as they are: they are copied, and the call is made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from flashwright.kernels.tensors import check_layout
from flashwright.runtime.tensors import Packed, device_tensor, empty_output, in_vectors, with_vector_rows

if TYPE_CHECKING:
    import torch

Results: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
"""The output and, if it is computed, the log-sum-exp."""


class CopiesFirst:
    """In the place of an arrangement for tensors whose rows the kernel cannot move in 16-byte vectors."""

    def __init__(self, run_again: Callable[..., Results]) -> None:
        """`run_again`: the call, for tensors that a kernel can read."""
        self._run_again = run_again

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        packed: Packed | None = None,
        lse: torch.Tensor | None = None,
    ) -> Results:
        """Copies what must be copied. Room for the output that is laid out as q was is replaced if need be."""
        if not in_vectors(out):
            out = empty_output(q)
        check_layout(device_tensor("out", out))
        q, k, v = (with_vector_rows(x) for x in (q, k, v))
        return self._run_again(q, k, v, out, starts, packed, lse)
