"""The ranks of a call: a process group, or a mesh whose first dimension shares the sequence and whose second shares
heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashwright.distributed.heads import HeadExchange
from flashwright.distributed.layouts import Holdings, joined
from flashwright.distributed.rounds import sorted_transfers
from flashwright.distributed.transport import RankFailure, Transport

if TYPE_CHECKING:
    import torch

MAX_MESH_DIMENSIONS = 2


@dataclass(frozen=True)
class Ranks:
    whole: Transport
    """All ranks of the call."""
    sequence: Transport | None = None
    heads: Transport | None = None
    """The dimensions of a mesh of two."""

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Of a process group, a DeviceMesh, or None: the default group, or this process by itself."""
        if group is None or not hasattr(group, "mesh_dim_names"):
            return cls(Transport(group))
        place = group.get_coordinate()
        if place is None:
            raise ValueError(f"group: this rank is not in the mesh, {group.mesh.tolist()}")
        members = group.mesh.tolist()
        if group.ndim == 1:
            return cls(Transport(group.get_group(), members))
        if group.ndim > MAX_MESH_DIMENSIONS:
            raise ValueError(
                f"group: a mesh of {group.ndim} dimensions; allowed: 1, or 2 (the sequence, then heads). "
                "mesh['name'] is a part of it"
            )
        row, column = place
        return cls(
            _of_all(tuple(member for each in members for member in each)),
            Transport(group.get_group(0), [each[column] for each in members]),
            Transport(group.get_group(1), members[row]),
        )

    @property
    def transports(self) -> list[Transport]:
        return [each for each in (self.whole, self.sequence, self.heads) if each is not None]

    def connect(self, device: torch.device) -> None:
        for each in self.transports:
            each.connect(device)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """An error of this rank reaches all others, which wait for messages, as a `RankFailure` that names it."""
        try:
            yield
        except RankFailure as failure:
            reason = self.whole.told()
            self._end(f"rank {self.index} waited for a message that did not come")
            where = f"rank {self.index} of {self.size}"
            if reason is None:
                raise RankFailure(f"{where}: {failure}") from failure
            raise RankFailure(f"{where} stops, because {reason}. The process group is of no further use.") from failure
        except Exception as error:
            self._end(f"rank {self.index} failed: {type(error).__name__}: {error}")
            raise

    def _end(self, reason: str) -> None:
        """In this order: a rank whose connection closes finds the reason."""
        self.whole.tell(reason)
        for each in self.transports:
            each.close()

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
        """The place in the layout: on a mesh, rows of it one after the other."""
        return self.whole.rank


def _of_all(members: tuple[int, ...]) -> Transport:
    """All ranks of a mesh; a group of their own if there are others."""
    import torch.distributed as dist

    covers_all = len(members) == dist.get_world_size()
    return Transport(None if covers_all else _group_of(members, dist.group.WORLD), members)


@lru_cache(maxsize=64)
def _group_of(members: tuple[int, ...], default: Any) -> Any:
    """Made once for a default group, by its members alone."""
    import torch.distributed as dist

    return dist.new_group(list(members), use_local_synchronization=True)


def shared_by_heads(by_rank: Holdings, head_ranks: int) -> Holdings:
    """What ranks hold when every `head_ranks` in a row have exchanged heads for rows."""
    return tuple(
        joined(sorted_transfers(by_rank[first : first + head_ranks])[0]) for first in range(0, len(by_rank), head_ranks)
    )


def head_exchange(transport: Transport, by_rank: Holdings, index: int) -> HeadExchange:
    """Of the rank with a place in the layout, and its neighbours."""
    first = index - transport.rank
    return HeadExchange(transport, sorted_transfers(by_rank[first : first + transport.size])[1])
