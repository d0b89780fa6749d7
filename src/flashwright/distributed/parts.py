"""A tile of attention: some rows of queries and some of the keys that they attend to, and what becomes of the whole.

The forward of a tile is an output and the log-sum-exp of its scores, and those of several tiles are merged in fp32. The
backward needs the log-sum-exp of all keys; gradients of tiles are added in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flashwright.distributed.merge_kernel import merge_on_gpu, merges_on_gpu
from flashwright.distributed.visibility import Launch, Span, Tile, packed_launches, single_launches
from flashwright.kernels.family import KernelConfig
from flashwright.operators.forward import run_on_gpu, run_on_simulator
from flashwright.problem.options import AttentionOptions
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

    def launches(self, tiles: Sequence[Tile], batch: int) -> list[Launch]:
        """On a GPU, small tiles share launches; packed sequences have no batch."""
        return packed_launches(tiles) if self.backend == "gpu" and batch == 1 else single_launches(tiles)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, launch: Launch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output, in fp32 or as the kernel rounds it, and log-sum-exp; of the launch's rows and keys."""
        options = self.options._replace(window=launch.window)
        if self.backend == "reference":
            precision = accumulation_dtype(q)
            return attention_reference(q.to(precision), k.to(precision), v.to(precision), options=options)
        if self.backend == "gpu":
            out, lse = run_on_gpu(
                q, k, v, options, with_lse=True, config=self.config, family=self.family, **_packing(launch, q)
            )
        else:
            out, lse = run_on_simulator(q, k, v, options, with_lse=True, config=self.config, family=self.family)
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
        launch: Launch,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The launch's part of the gradients of q, k and v; `out` and `lse` are those of all keys."""
        options = self.options._replace(window=launch.window)
        if self.backend == "reference":
            precision = accumulation_dtype(q)
            do, q, k, v, out = (x.to(precision) for x in (do, q, k, v, out))
            return attention_gradients(do, dlse, q, k, v, options=options, lse=lse, row_dot=(do * out).sum(-1))
        if self.backend == "gpu":
            from flashwright.operators.backward import differentiate_on_gpu

            return differentiate_on_gpu(
                do, dlse, q, k, v, out, lse, options, config=self.config, deterministic=self.deterministic,
                **_packing(launch, q),
            )  # fmt: skip
        from flashwright.operators.recorded import SimulatedCall

        call = SimulatedCall(options, self.config, self.family, deterministic=self.deterministic)
        return call.backward(do, dlse, q, k, v, out, lse)


def _packing(launch: Launch, q: torch.Tensor) -> dict[str, Any]:
    """What kernels take for packed sequences."""
    if not launch.q_starts:
        return {}
    starts = (_on_device(launch.q_starts, q.device), _on_device(launch.kv_starts, q.device))
    return {"starts": starts, "packed": (len(launch.q_starts) - 1, *launch.longest)}


@lru_cache(maxsize=256)
def _on_device(starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(starts, dtype=torch.int32, device=device)


def accumulation_dtype(q: torch.Tensor) -> torch.dtype:
    """fp32, or float64 for tensors of that."""
    import torch

    return torch.promote_types(q.dtype, torch.float32)


class Merged:
    """The output and the log-sum-exp of rows whose keys come in parts, in fp32 or better; those of a single part of all
    rows stay as they are."""

    def __init__(self, q: torch.Tensor) -> None:
        self._q = q
        self._precision = accumulation_dtype(q)
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None
        self._written: list[tuple[Span, Span]] = []

    def add(self, heads: Span, rows: Span, out: torch.Tensor, lse: torch.Tensor) -> None:
        """One part: a row of a part has weight exp(lse of the part) against that of the parts before it."""
        import torch

        first = not any(_overlap(heads, a) and _overlap(rows, b) for a, b in self._written)
        self._written.append((heads, rows))
        if self._sums is None and out.shape == self._q.shape:
            self._sums = (out, lse)
            return
        sums, sums_lse = self._sums = self._widened()
        place = (slice(None), heads.slice, rows.slice)
        known_out, known_lse = sums[place], sums_lse[place]
        if first:
            known_out.copy_(out)
            known_lse.copy_(lse)
            return
        if merges_on_gpu(known_out, out):
            merge_on_gpu(known_out, known_lse, out, lse)
            return
        lse = lse.to(known_lse.dtype)
        weight = torch.sigmoid(lse - known_lse).masked_fill_(lse == -math.inf, 0)  # -inf - -inf is no number
        known_out.lerp_(out.to(known_out.dtype), weight.unsqueeze(-1))
        torch.logaddexp(known_lse, lse, out=known_lse)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._widened() if self._sums is None else self._sums

    def _widened(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums so far, which parts may be mixed into."""
        if self._sums is not None:
            out, lse = self._sums
            return out.to(self._precision), lse.to(self._precision)
        q = self._q
        return q.new_zeros(q.shape, dtype=self._precision), q.new_full(q.shape[:3], -math.inf, dtype=self._precision)


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop
