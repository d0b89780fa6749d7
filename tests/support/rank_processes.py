"""Functions run by several processes at once, each a rank of a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
# The server imports what ranks need once; a rank is then a fork of it.
_context.set_forkserver_preload(["torch", "flashwright.distributed.call", "distributed_cases"])


class RankError(AssertionError):
    """A rank raised."""


def outcomes(size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60) -> list[Any]:
    """What the function returned, or the exception's type and message, of every rank. `timeout_s`: of the group."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        pipes = [_context.Pipe(duplex=False) for _ in range(size)]
        processes = [
            _context.Process(
                target=_rank,
                args=(rank, size, str(Path(folder) / "store"), timeout_s, pipes[rank][1], function, arguments),
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for _, sending in pipes:
            sending.close()
        found: list[Any] = []
        try:
            for rank, (receiving, _) in enumerate(pipes):
                try:
                    found.append(receiving.recv() if receiving.poll(2 * timeout_s) else ("Silent", f"rank {rank}"))
                except EOFError:
                    found.append(("Died", f"rank {rank}"))
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
        return found


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60) -> list[Any]:
    """What the function returned on every rank; raises `RankError` with the first traceback if any of them raised."""
    found = outcomes(size, function, *arguments, timeout_s=timeout_s)
    for rank, outcome in enumerate(found):
        if outcome[0] != "returned":
            raise RankError(f"rank {rank} of {size}: {outcome[0]}: {outcome[1]}")
    return [outcome[1] for outcome in found]


def _rank(
    rank: int, size: int, store: str, timeout_s: float, pipe: Any, function: Callable[..., Any], arguments: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
        pipe.send(("returned", function(*arguments)))
    except BaseException as error:
        pipe.send((type(error).__name__, f"{error}\n{traceback.format_exc()}"))
    pipe.close()
