"""A tile of attention: some rows of queries and some of the keys that they attend to, and what becomes of the whole.

The forward of a tile is an output and the log-sum-exp of its scores; kernels mix them into those of the tiles before,
in fp32. The backward needs the log-sum-exp of all keys; kernels add gradients of tiles to sums in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from flashwright.distributed.visibility import Launch, Tile, packed_launches, single_launches
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
        if not batch:
            return []
        return packed_launches(tiles) if self.backend == "gpu" and batch == 1 else single_launches(tiles)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        launch: Launch,
        sums: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of the launch's rows and keys; mixed into `sums`, if given: those of other keys, in
        fp32 or better, minus infinity where no key has come yet."""
        options = self.options._replace(window=launch.window)
        if self.backend == "reference":
            precision = accumulation_dtype(q)
            part = attention_reference(q.to(precision), k.to(precision), v.to(precision), options=options)
            return part if sums is None else _mixed(sums, *part)
        if self.backend == "gpu":
            out, lse = run_on_gpu(
                q, k, v, options, with_lse=True, config=self.config, family=self.family, sums=sums,
                **_packing(launch, q),
            )  # fmt: skip
        else:
            out, lse = run_on_simulator(
                q, k, v, options, with_lse=True, config=self.config, family=self.family, sums=sums
            )
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
        sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Adds the launch's part of the gradients of q, k and v to `sums`; `out` and `lse` are those of all keys."""
        options = self.options._replace(window=launch.window)
        if self.backend == "reference":
            precision = accumulation_dtype(q)
            do, q, k, v, out = (x.to(precision) for x in (do, q, k, v, out))
            part = attention_gradients(do, dlse, q, k, v, options=options, lse=lse, row_dot=(do * out).sum(-1))
            for total, gradient in zip(sums, part, strict=True):
                total += gradient
        elif self.backend == "gpu":
            from flashwright.operators.backward import differentiate_on_gpu

            differentiate_on_gpu(
                do, dlse, q, k, v, out, lse, options, config=self.config, family=self.family,
                deterministic=self.deterministic, sums=sums, **_packing(launch, q),
            )  # fmt: skip
        else:
            from flashwright.operators.recorded import SimulatedCall

            call = SimulatedCall(options, self.config, self.family, deterministic=self.deterministic)
            call.backward(do, dlse, q, k, v, out, lse, sums=sums)


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


def no_keys_yet(q: torch.Tensor, *, all_come_first: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of rows, in fp32 or better, that parts are to be mixed into. What the first part has all
    rows of need not be cleared."""
    precision = accumulation_dtype(q)
    new = q.new_empty if all_come_first else q.new_zeros
    return new(q.shape, dtype=precision), q.new_full(q.shape[:3], -math.inf, dtype=precision)


def _mixed(
    sums: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One more part in the sums: a row has the weight exp(lse of the part) against that of the parts before it."""
    import torch

    known_out, known_lse = sums
    weight = torch.sigmoid(lse - known_lse).masked_fill_(lse == -math.inf, 0).unsqueeze(-1)  # -inf - -inf: no number
    known_out.copy_(torch.where(known_lse.unsqueeze(-1) == -math.inf, out, torch.lerp(known_out, out, weight)))
    torch.logaddexp(known_lse, lse, out=known_lse)
    return sums
