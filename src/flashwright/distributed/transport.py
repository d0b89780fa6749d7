"""Messages between the ranks of a group; and how a failure of one becomes an error of all.

Tensors on a GPU travel by NCCL where the group has it, on its own stream. Without it they travel through pinned host
memory, copied on a second stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Message: TypeAlias = "tuple[int, torch.Tensor]"
"""The rank of the group on the other side, and a contiguous tensor."""
FAILURE_KEY = "flashwright/failure"
_CLOSING_TAG = 2**20 + 19
"""No message has it."""


class RankFailure(RuntimeError):
    """Another rank failed, or did not answer in time."""


class Transport:
    """The ranks of one group, as this one sees them."""

    group: Any

    def __init__(self, group: Any = None, members: Sequence[int] | None = None) -> None:
        """`members`: the ranks of the default group that it has, in the order in which they are counted here; by
        default the group's own."""
        import torch.distributed as dist

        self._dist = dist
        connected = dist.is_available() and dist.is_initialized()
        if not connected:
            if group is not None:
                raise ValueError(
                    "group: torch.distributed is not initialised; call torch.distributed.init_process_group"
                )
            self.group, self._members, self.size, self.rank = None, [0], 1, 0
            return
        self.group = dist.group.WORLD if group is None else group
        me = dist.get_rank()
        if dist.get_rank(self.group) < 0:
            raise ValueError(f"group: rank {me} of the default group is not in it")
        self._members = list(dist.get_process_group_ranks(self.group) if members is None else members)
        self.size, self.rank = len(self._members), self._members.index(me)

    @classmethod
    def alone(cls) -> Transport:
        """A rank that shares with no other."""
        found = cls.__new__(cls)
        found.group, found.size, found.rank = None, 1, 0
        return found

    def start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Messages under way; between two ranks they arrive in the order in which they were sent."""
        outgoing = [(rank, tensor) for rank, tensor in sends if tensor.numel()]
        incoming = [(rank, tensor) for rank, tensor in receives if tensor.numel()]
        if not outgoing and not incoming:
            return Pending(self, [])
        tensor = (outgoing or incoming)[0][1]
        if tensor.is_cuda and not self._has_nccl():
            return _through_host(self, outgoing, incoming)
        return Pending(self, self.post(outgoing, incoming), keep=(outgoing, incoming))

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        dist = self._dist
        operations = [
            dist.P2POp(operation, tensor, self._members[rank], self.group)
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for rank, tensor in messages
        ]
        try:
            return dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise self.failure(error) from error

    def gathered(self, values: Sequence[int], device: torch.device) -> list[list[int]]:
        """The same number of integers of every rank."""
        import torch

        if self.size == 1:
            return [list(values)]
        place = device if device.type == "cuda" and self._has_nccl() else torch.device("cpu")
        mine = torch.tensor(values, dtype=torch.int64, device=place)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self._dist.all_gather(found, mine, group=self.group)
        except RuntimeError as error:
            raise self.failure(error) from error
        by_group_rank = torch.stack(found).tolist()
        return [by_group_rank[self._dist.get_group_rank(self.group, member)] for member in self._members]

    def connect(self, device: torch.device) -> None:
        """Every rank calls it before messages, whether it has any or not: NCCL connects the ranks of a group when all
        of them take part in something; later messages may concern some of them only."""
        if self.size > 1 and device.type == "cuda" and self._has_nccl():
            _connect_all(self.group, device)

    def _has_nccl(self) -> bool:
        return self._backend_of("cuda") == "nccl"

    def _backend_of(self, device_type: str) -> str | None:
        """What carries tensors of such a device."""
        config = str(self._dist.get_backend_config(self.group))  # "cpu:gloo,cuda:nccl"
        return dict(pair.split(":") for pair in config.split(",")).get(device_type)

    # --- Failures ----------------------------------------------------------------------------------------------

    def failure(self, error: Exception) -> RankFailure:
        """What to raise where a message failed."""
        return RankFailure(f"another rank failed or did not answer in time ({error})")

    def tell(self, reason: str) -> None:
        """Leaves the reason where the other ranks look, unless one of them did."""
        if self.size > 1 and self.told() is None:
            with suppress(RuntimeError, ValueError):  # the store was another rank's, which is gone
                self._store().set(self._failure_key, reason)

    def told(self) -> str | None:
        """Why a rank of the group failed, if one has told."""
        try:
            store = self._store()
            return store.get(self._failure_key).decode() if store.check([self._failure_key]) else None
        except (RuntimeError, ValueError):
            return None

    def close(self) -> None:
        """Closes gloo's connections, so that no rank waits for a message. Those that NCCL connects end by the group's
        timeout."""
        import torch

        if self.size == 1 or self._backend_of("cpu") != "gloo":
            return
        for rank, member in enumerate(self._members):
            if rank == self.rank:
                continue
            with suppress(RuntimeError):
                work = self._dist.irecv(torch.empty(1), src=member, group=self.group, tag=_CLOSING_TAG)
                work.wait(timedelta(milliseconds=1))  # gloo closes a connection whose wait ran out

    @property
    def _failure_key(self) -> str:
        return f"{FAILURE_KEY}/{self.group.group_name}"

    def _store(self) -> Any:
        return self._dist.distributed_c10d._get_default_store()


class Pending:
    """Messages under way."""

    def __init__(self, transport: Transport, works: Sequence[Any], keep: Any = None) -> None:
        self._transport = transport
        self._works = works
        self._keep = keep
        """What must not be freed before the messages have arrived."""

    def wait(self) -> None:
        """Returns when what was received may be used, by the host or on the current stream."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise self._transport.failure(error) from error
        self._keep = None


class _PendingThroughHost(Pending):
    def __init__(self, transport: Transport, works: Sequence[Any], arrivals: Any, stream: Any, keep: Any) -> None:
        super().__init__(transport, works, keep)
        self._arrivals = arrivals
        self._stream = stream

    def wait(self) -> None:
        import torch

        kept = self._keep
        super().wait()
        for host, tensor in self._arrivals:
            with torch.cuda.stream(self._stream):
                tensor.copy_(host, non_blocking=True)
                tensor.record_stream(self._stream)
        if self._arrivals:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        del kept


def _through_host(transport: Transport, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
    import torch

    device = (sends or receives)[0][1].device
    stream = _copy_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    outgoing = []
    with torch.cuda.stream(stream):
        for rank, tensor in sends:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            outgoing.append((rank, host))
    incoming = [(rank, torch.empty(x.shape, dtype=x.dtype, pin_memory=True)) for rank, x in receives]
    stream.synchronize()  # the host sends what has arrived
    works = transport.post(outgoing, incoming)
    arrivals = [(host, tensor) for (_, host), (_, tensor) in zip(incoming, receives, strict=True)]
    return _PendingThroughHost(transport, works, arrivals, stream, (outgoing, incoming))


@lru_cache(maxsize=16)
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    import torch

    return torch.cuda.Stream(device)


@lru_cache(maxsize=64)
def _connect_all(group: Any, device: torch.device) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=device), group=group)
