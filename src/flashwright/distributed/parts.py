"""A tile of attention: some rows of queries and some of the keys that they attend to, and what becomes of the whole.

The forward of a tile is an output and the log-sum-exp of its scores, and those of several tiles are merged in fp32. The
backward needs the log-sum-exp of all keys; gradients of tiles are added in fp32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashwright.distributed.visibility import Span
from flashwright.kernels.family import KernelConfig
from flashwright.operators.forward import run_on_gpu, run_on_simulator
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window
from flashwright.runtime.reference import attention_gradients, attention_reference

if TYPE_CHECKING:
    import torch


class Kernels(NamedTuple):
    """What computes tiles. Of the options, the window is the tile's."""

    options: AttentionOptions
    backend: str
    """"gpu", "simulator" or "reference"."""
    config: KernelConfig | str | None = None
    family: str | None = None
    deterministic: bool = False

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Window
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, in fp32 or as the kernel rounds it, and log-sum-exp."""
        options = self.options._replace(window=window)
        if self.backend == "reference":
            precision = accumulation_dtype(q)
            return attention_reference(q.to(precision), k.to(precision), v.to(precision), options=options)
        run = run_on_gpu if self.backend == "gpu" else run_on_simulator
        out, lse = run(q, k, v, options, with_lse=True, config=self.config, family=self.family)
        assert lse is not None
        return out, lse

    def backward(
        self,
        do: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        window: Window,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile's part of the gradients of q, k and v; `out` and `lse` are those of all keys."""
        options = self.options._replace(window=window)
        if self.backend == "reference":
            precision = accumulation_dtype(q)
            do, q, k, v, out = (x.to(precision) for x in (do, q, k, v, out))
            return attention_gradients(do, dlse, q, k, v, options=options, lse=lse, row_dot=(do * out).sum(-1))
        if self.backend == "gpu":
            from flashwright.operators.backward import differentiate_on_gpu

            return differentiate_on_gpu(
                do, dlse, q, k, v, out, lse, options, config=self.config, deterministic=self.deterministic
            )
        from flashwright.operators.recorded import SimulatedCall

        call = SimulatedCall(options, self.config, self.family, deterministic=self.deterministic)
        return call.backward(do, dlse, q, k, v, out, lse)


def accumulation_dtype(q: torch.Tensor) -> torch.dtype:
    """fp32, or float64 for tensors of that."""
    import torch

    return torch.promote_types(q.dtype, torch.float32)


class Merged:
    """The output and the log-sum-exp of rows whose keys come in parts, in fp32 or better."""

    def __init__(self, q: torch.Tensor) -> None:
        precision = accumulation_dtype(q)
        self.out = q.new_zeros(q.shape, dtype=precision)
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=precision)
        self._written: list[tuple[Span, Span]] = []

    def add(self, heads: Span, rows: Span, out: torch.Tensor, lse: torch.Tensor) -> None:
        """One part: a row of a part has weight exp(lse of the part) against that of the parts before it."""
        import torch

        place = (slice(None), heads.slice, rows.slice)
        known_out, known_lse = self.out[place], self.lse[place]
        first = not any(_overlap(heads, a) and _overlap(rows, b) for a, b in self._written)
        self._written.append((heads, rows))
        if first:
            known_out.copy_(out)
            known_lse.copy_(lse)
            return
        lse = lse.to(known_lse.dtype)
        weight = torch.sigmoid(lse - known_lse).masked_fill_(lse == -math.inf, 0)  # -inf - -inf is no number
        known_out.lerp_(out.to(known_out.dtype), weight.unsqueeze(-1))
        torch.logaddexp(known_lse, lse, out=known_lse)


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop
