"""The ranks of a call: a process group, or a mesh whose first dimension shares the sequence and whose second shares
heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashwright.distributed.heads import HeadExchange
from flashwright.distributed.layouts import Holdings, joined
from flashwright.distributed.rounds import sorted_transfers
from flashwright.distributed.transport import Transport

MAX_MESH_DIMENSIONS = 2


@dataclass(frozen=True)
class Ranks:
    whole: Transport
    """All ranks of the call."""
    sequence: Transport | None = None
    heads: Transport | None = None
    """The dimensions of a mesh of two."""
    places: tuple[int, ...] = ()
    """By place in the layout: the rank of the whole group."""

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Of a process group, a DeviceMesh, or None: the default group, or this process by itself."""
        if group is None or not hasattr(group, "mesh_dim_names"):
            return cls._of_group(Transport(group))
        if group.ndim == 1:
            return cls._of_group(Transport(group.get_group()))
        if group.ndim > MAX_MESH_DIMENSIONS:
            raise ValueError(
                f"group: a mesh of {group.ndim} dimensions; allowed: 1, or 2 (the sequence, then heads). "
                "mesh['name'] is a part of it"
            )
        import torch.distributed as dist

        covers_all = group.mesh.numel() == dist.get_world_size()
        whole = Transport(None if covers_all else group._flatten().get_group())
        members = group.mesh.flatten().tolist()
        places = tuple(members) if covers_all else tuple(dist.get_group_rank(whole.group, each) for each in members)
        return cls(whole, Transport(group.get_group(0)), Transport(group.get_group(1)), places)

    @classmethod
    def _of_group(cls, whole: Transport) -> Ranks:
        return cls(whole, places=tuple(range(whole.size)))

    @property
    def shape(self) -> tuple[int, ...]:
        if self.sequence is None or self.heads is None:
            return (self.whole.size,)
        return (self.sequence.size, self.heads.size)

    @property
    def size(self) -> int:
        return self.whole.size

    @property
    def index(self) -> int:
        """The place in the layout."""
        if self.sequence is None or self.heads is None:
            return self.whole.rank
        return self.sequence.rank * self.heads.size + self.heads.rank


def shared_by_heads(by_rank: Holdings, head_ranks: int) -> Holdings:
    """What ranks hold when every `head_ranks` in a row have exchanged heads for rows."""
    return tuple(
        joined(sorted_transfers(by_rank[first : first + head_ranks])[0]) for first in range(0, len(by_rank), head_ranks)
    )


def head_exchange(transport: Transport, by_rank: Holdings, index: int) -> HeadExchange:
    """Of the rank with a place in the layout, and its neighbours."""
    first = index - transport.rank
    return HeadExchange(transport, sorted_transfers(by_rank[first : first + transport.size])[1])
