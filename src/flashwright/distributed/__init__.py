"""Attention over sequences that several ranks share, on `torch.distributed`.

    from flashwright import distributed
    tokens = distributed.shard(tokens, dim=1)                  # this rank's rows of what every rank has
    out = distributed.attention(q, k, v, causal=True)          # on shards; every rank calls it
    whole = distributed.unshard(out, dim=2)

Planning (`flashwright plan`) needs no PyTorch: what does is imported when it is used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from flashwright.distributed.context import context_parallel
from flashwright.distributed.layouts import Documents, holdings

if TYPE_CHECKING:
    from flashwright.distributed.call import attention, strategy_for
    from flashwright.distributed.shards import positions, shard, shard_batch, unshard
    from flashwright.distributed.transport import RankFailure

__all__ = [
    "Documents",
    "RankFailure",
    "attention",
    "context_parallel",
    "holdings",
    "positions",
    "shard",
    "shard_batch",
    "strategy_for",
    "unshard",
]

_PLACES = {
    "RankFailure": "transport",
    "attention": "call",
    "positions": "shards",
    "shard": "shards",
    "shard_batch": "shards",
    "strategy_for": "call",
    "unshard": "shards",
}


def _let_groups_end() -> None:
    """Nothing of a destroyed process group may outlive it: a thread that drops a tensor while the interpreter ends
    aborts the process. The functions of `torch.distributed.nn.functional`, which PyTorch's compiler imports, keep the
    default group of that moment as a default argument. Imported before there is a group, they keep none."""
    if sys.modules.get("torch") is not None:  # whoever makes a group has it
        import torch.distributed

        if torch.distributed.is_available():
            import torch.distributed.nn.functional


_let_groups_end()


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
