"""`with context_parallel(mesh):` attention of a model's layers is shared by ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from flashwright.distributed.layouts import ZIGZAG, Layout
from flashwright.distributed.strategies import AUTO


class ContextParallel(NamedTuple):
    """The arguments of `attention` that a model does not know."""

    group: Any = None
    layout: Layout = ZIGZAG
    strategy: str | Sequence[str] = AUTO
    length: int | None = None
    cu_seqlens: Any = None

    def attention(self, q: Any, k: Any, v: Any, *, cu_seqlens: Any = None, **options: Any) -> Any:
        from flashwright.distributed.call import attention

        starts = self.cu_seqlens if cu_seqlens is None else cu_seqlens
        return attention(
            q, k, v, self.group, self.layout, self.strategy, length=self.length, cu_seqlens=starts, **options
        )


_active: list[ContextParallel] = []
"""Of all threads: layers that are checkpointed are computed again by the threads of autograd."""


@contextmanager
def context_parallel(
    group: Any = None,
    layout: Layout = ZIGZAG,
    strategy: str | Sequence[str] = AUTO,
    *,
    length: int | None = None,
    cu_seqlens: Any = None,
) -> Iterator[ContextParallel]:
    """Models with `attn_implementation="flashwright"` attend over the whole sequence, of which ranks hold shards.

    The arguments are those of `distributed.attention`. Give a model what `shard_batch` returns, with `use_cache=False`.
    If layers are checkpointed, the backward belongs inside, too: they are computed again there.
    """
    _active.append(ContextParallel(group, layout, strategy, length, cu_seqlens))
    try:
        yield _active[-1]
    finally:
        _active.pop()


def active_context() -> ContextParallel | None:
    """The innermost `context_parallel` that has been entered."""
    return _active[-1] if _active else None
