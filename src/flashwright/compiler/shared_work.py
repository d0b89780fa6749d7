"""Work that many threads request and one does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any


class SharedWork:
    """Runs each piece of work once, however many threads request it at the same time."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._under_way: dict[Any, Future[Any]] = {}

    def once(self, key: Any, work: Callable[[], Any]) -> Any:
        """What `work` returns or raises, in the thread that came first and in those that came meanwhile."""
        with self._lock:
            future = self._under_way.get(key)
            mine = future is None
            if future is None:
                future = self._under_way[key] = Future()
        if not mine:
            return future.result()
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[key]
        return future.result()
