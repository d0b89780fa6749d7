"""Messages between the ranks of a group; and how a failure of one becomes an error of all.

Tensors on a GPU travel by NCCL where the group has it, on its own stream. Without it they travel through pinned host
memory, copied on a second stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.group = group
        connected = dist.is_available() and dist.is_initialized()
        if group is not None and not connected:
            raise ValueError("group: torch.distributed is not initialised; call torch.distributed.init_process_group")
        self.size: int = dist.get_world_size(group) if connected else 1
        self.rank: int = dist.get_rank(group) if connected else 0
        if self.rank < 0:
            raise ValueError(f"group: rank {dist.get_rank()} of the default group is not in it")

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
        if tensor.is_cuda and not self._sends_from_gpu(tensor):
            return _through_host(self, outgoing, incoming)
        return Pending(self, self.post(outgoing, incoming), keep=(outgoing, incoming))

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> list[Any]:
        dist = self._dist
        operations = [
            dist.P2POp(operation, tensor, self._global(rank), self.group)
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
        return torch.stack(found).tolist()

    def _global(self, rank: int) -> int:
        return rank if self.group is None else int(self._dist.get_global_rank(self.group, rank))

    def _has_nccl(self) -> bool:
        return "nccl" in str(self._dist.get_backend(self.group)) or "cuda:nccl" in str(
            self._dist.get_backend_config(self.group)
        )

    def _sends_from_gpu(self, tensor: torch.Tensor) -> bool:
        if not self._has_nccl():
            return False
        _connect_all(self.group, tensor.device)
        return True

    # --- Failures ----------------------------------------------------------------------------------------------

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """An error of this rank reaches all others, which wait for messages, as a `RankFailure`."""
        try:
            yield
        except RankFailure:
            self._tell("a message did not arrive")
            raise
        except Exception as error:
            self._tell(f"{type(error).__name__}: {error}")
            raise

    def failure(self, error: Exception) -> RankFailure:
        """What to raise where a message failed: the other rank's reason, where it gave one."""
        reason = self._told()
        where = f"rank {self.rank} of {self.size}"
        if reason is not None:
            return RankFailure(f"{where} stops, because {reason}. The process group is of no further use.")
        return RankFailure(f"{where}: another rank failed or did not answer in time ({error})")

    def _tell(self, reason: str) -> None:
        """Leaves the reason where others look, and closes the connections, so that none waits for a message."""
        if self.size == 1:
            return
        if self._told() is None:
            self._store().set(FAILURE_KEY, f"rank {self.rank} failed: {reason}")
        if self._has_nccl():
            return  # the other ranks end by the group's timeout
        import torch

        for rank in range(self.size):
            if rank == self.rank:
                continue
            try:
                work = self._dist.irecv(torch.empty(1), src=self._global(rank), group=self.group, tag=_CLOSING_TAG)
                work.wait(timedelta(milliseconds=1))  # gloo closes a connection whose wait ran out
            except RuntimeError:
                pass

    def _told(self) -> str | None:
        try:
            store = self._store()
            return store.get(FAILURE_KEY).decode() if store.check([FAILURE_KEY]) else None
        except (RuntimeError, ValueError):  # the store was another rank's, which is gone
            return None

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
    """NCCL connects the ranks of a group when all of them call it; later messages may concern some of them only."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=device), group=group)
