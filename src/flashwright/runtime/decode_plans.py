"""Launch plans of decoding: what a call decides once and repeats, kept apart from the addresses of its tensors.

A `DecodeKind` is what a caller requests, shapes and strides apart. Within it, a `DecodeArrangement` has the packed
parameters of its launches for tensors of certain shapes and strides. A cache that fills changes nothing here: lengths
lie on the device; and one that is a longer tensor in every call changes a few words.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flashwright.hardware.units import ELEMENT_BYTES, VECTOR_BYTES
from flashwright.kernels.decode.append import (
    APPEND,
    AppendArguments,
    AppendJob,
    AppendLaunch,
    Rotary,
    append_launch,
)
from flashwright.kernels.decode.launch import CacheView, DecodeLaunch, DecodeScratch, decode_scratch
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.launch import Grid
from flashwright.kernels.registry import family_of
from flashwright.kernels.tensors import DeviceTensor, check_layout
from flashwright.problem.dtypes import DType
from flashwright.problem.lengths import MAX_LENGTH
from flashwright.problem.options import AttentionOptions
from flashwright.runtime.devices import multiprocessors
from flashwright.runtime.forward_words import K_WORD, LENGTHS_WORD, V_WORD
from flashwright.runtime.loaded import LoadedKernel, loaded_kernel
from flashwright.runtime.parameters import WORD_BYTES, Parameters, words_of
from flashwright.runtime.tensors import device_tensor
from flashwright.runtime.zeros import zeros_of

if TYPE_CHECKING:
    import torch

ELEMENTS_PER_VECTOR = VECTOR_BYTES // ELEMENT_BYTES
Choose = Callable[[int, int], KernelConfig]
"""The config for a head dimension and a number of packed rows."""


class CacheTensors(NamedTuple):
    """Which keys of a cache each sequence has: int32 tensors on the cache's device, contiguous."""

    kv_lengths: torch.Tensor | None = None
    """Before anything is appended; None: all that the cache holds."""
    kv_begins: torch.Tensor | None = None
    cache_index: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    q_starts: torch.Tensor | None = None
    """Of ragged queries, in a q of batch 1."""
    max_q_length: int = 0


class NewRows(NamedTuple):
    """What is done before: keys and values that are appended, (batch, heads, rows, head_dim), and the rotation of them
    and of the queries."""

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    cosines: torch.Tensor | None = None
    sines: torch.Tensor | None = None
    interleaved: bool = True
    advances: bool = True
    """The positions of queries grow from row to row."""


NOTHING_NEW = NewRows()


def is_in_keys(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the values of a cache are the first columns of its keys, in the same memory."""
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[-1] <= k.shape[-1]


class DecodeKind:
    """Calls that differ in the shapes, strides and addresses of their tensors only."""

    MOST_ARRANGEMENTS = 1024

    def __init__(
        self,
        options: AttentionOptions,
        choose: Choose,
        *,
        returns_lse: bool,
        device_index: int,
        split_units: int = 0,
    ) -> None:
        import torch

        self.torch = torch
        self.options = options
        self.returns_lse = returns_lse
        self.device_index = device_index
        self.split_units = split_units
        self.choose = choose
        self.arrangements: dict[tuple[Any, ...], DecodeArrangement] = {}

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cache: CacheTensors,
        new: NewRows = NOTHING_NEW,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queues the launches for tensors that are not empty and whose rows are 16-byte vectors; returns the output
        and, if requested, the log-sum-exp."""
        tensors: tuple[torch.Tensor | None, ...] = (q, k, v, out, *cache[:5], *new[:4])
        k_shape = k.shape
        # The rows and strides of a cache are written at every run, unless they decide more than that.
        whole = cache.page_table is not None or self.split_units
        keys = k_shape if whole else (k_shape[0], k_shape[1], k_shape[3])
        layout = (
            q.shape, q.stride(), out.stride(), keys, v.shape[3], cache.max_q_length, *new[4:],
            *(None if x is None else (x.shape, x.stride()) for x in tensors[4:]),
        )  # fmt: skip
        arrangement = self.arrangements.get(layout)
        if arrangement is None:
            if len(self.arrangements) >= self.MOST_ARRANGEMENTS:
                self.arrangements.clear()
            arrangement = self.arrangements[layout] = DecodeArrangement(self, tensors, cache, new)
        return arrangement.run(tensors)


# Where the first two jobs of `AppendArguments`, which write keys and values, have their targets.
_TARGETS = [
    (AppendArguments.jobs.offset + job * ctypes.sizeof(AppendJob) + AppendJob.target.offset) // WORD_BYTES
    for job in (0, 1)
]

# Behind the tensors that a caller gives.
_LSE, _PARTIALS, _ZEROS, _ROTATED = range(13, 17)
_MARK = 0x7ACE
"""The highest 16 bits of what stands in the place of an address until it is known: behind them, which tensor's."""


def _marker(index: int) -> int:
    return _MARK << 48 | index << 32


class Template:
    """A launch's parameters, and which tensors' addresses they hold."""

    def __init__(self, kernel: LoadedKernel, grid: Grid, arguments: ctypes.Structure) -> None:
        self.kernel = kernel
        self.grid = grid
        self.words = words_of(arguments)
        self.places = [
            (word, value >> 32 & 0xFFFF, value & 0xFFFFFFFF)
            for word, value in enumerate(self.words)
            if value >> 48 == _MARK
        ]
        """(word, tensor, bytes from its beginning)."""

    def launch(self, addresses: list[int], cache_words: Sequence[tuple[int, int]], stream: int) -> None:
        words: array[int] = self.words[:]
        for word, tensor, offset in self.places:
            words[word] = addresses[tensor] + offset
        for word, value in cache_words:
            words[word] = value
        self.kernel.launch(self.grid, Parameters(words, (0,)).address, stream)


class DecodeArrangement:
    """The launches for tensors of certain shapes and strides."""

    def __init__(
        self, kind: DecodeKind, tensors: tuple[torch.Tensor | None, ...], cache: CacheTensors, new: NewRows
    ) -> None:
        self.kind = kind
        q, k, v, out = tensors[:4]
        assert q is not None and k is not None and v is not None and out is not None
        index = kind.device_index
        self.rotates_queries = new.cosines is not None
        self.appends_keys = new.k is not None
        self.is_paged = cache.page_table is not None
        self.is_ragged = cache.q_starts is not None
        views = [
            DeviceTensor(name, _marker(place), DType.parse(str(x.dtype)), tuple(x.shape), tuple(x.stride()))
            for place, (name, x) in enumerate((("q", q), ("k_cache", k), ("v_cache", v), ("out", out)))
        ]
        view = _cache_view(q, cache, 0 if new.k is None else new.k.shape[2])
        group_rows = (cache.max_q_length if cache.q_starts is not None else q.shape[2]) * (q.shape[1] // k.shape[1])
        config: Any = kind.choose(max(q.shape[3], v.shape[3]), group_rows)
        self.values_in_keys = family_of(config).launch_rules.values_in_keys > 0
        blocks = multiprocessors(index)
        self.scratch: DecodeScratch = decode_scratch(
            config, views[0], views[1], view, multiprocessors=blocks, split_units=kind.split_units
        )
        attended = list(views)
        if self.rotates_queries:
            rotated = self.kind.torch.empty_like(q, memory_format=self.kind.torch.contiguous_format)
            attended[0] = DeviceTensor("q", _marker(_ROTATED), views[0].dtype, views[0].shape, tuple(rotated.stride()))
        launch: DecodeLaunch = family_of(config).launch(
            config,
            *attended,
            cache=view,
            partials_address=_marker(_PARTIALS),
            zeros_address=_marker(_ZEROS),
            multiprocessors=blocks,
            options=kind.options,
            lse_address=_marker(_LSE) if kind.returns_lse else 0,
            split_units=kind.split_units,
        )
        self.own = Template(loaded_kernel(config, launch.variant, index), launch.grid, launch.arguments)
        self.append: Template | None = None
        if new.k is not None or self.rotates_queries:
            appended = _append(launch, views, attended[0], new)
            kernel = loaded_kernel(config, launch.variant, index, APPEND)
            self.append = Template(kernel, appended.grid, appended.arguments)

    def run(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
        kind = self.kind
        torch = kind.torch
        q, k, v, out = tensors[:4]
        assert q is not None and k is not None and v is not None and out is not None
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        for name, address in zip(("q", "k_cache", "v_cache", "out"), addresses, strict=False):
            if address % VECTOR_BYTES:
                raise ValueError(f"{name}: address {address:#x} is not aligned to {VECTOR_BYTES} bytes")
        cache_words = self._cache_words(tensors)
        if self.values_in_keys and not is_in_keys(k, v):
            raise ValueError("v_cache: is no view of the first columns of k_cache, which the kernel takes for values")
        index = kind.device_index
        stream = torch._C._cuda_getCurrentRawStream(index)
        lse = self._empty_lse(q) if kind.returns_lse else None
        partials = torch.empty(self.scratch.partial_bytes, dtype=torch.uint8, device=q.device)
        zeros = zeros_of(q.device).take(self.scratch.zeros, stream)
        rotated = torch.empty_like(q, memory_format=torch.contiguous_format) if self.rotates_queries else None
        addresses += [0 if x is None else x.data_ptr() for x in (lse, partials, zeros, rotated)]
        if index == torch._C._cuda_getDevice():
            self._launch(addresses, cache_words, stream)
        else:
            with torch.cuda.device(index):
                self._launch(addresses, cache_words, stream)
        return out, lse

    def _empty_lse(self, q: torch.Tensor) -> torch.Tensor:
        torch = self.kind.torch
        if not self.is_ragged:
            return torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        return torch.full(q.shape[:3], -torch.inf, device=q.device)  # rows of no sequence are not written

    def _cache_words(self, tensors: tuple[torch.Tensor | None, ...]) -> list[tuple[int, int]]:
        """What follows from the cache's rows and strides: (word of the arguments, value)."""
        q, k, v = tensors[:3]
        assert q is not None and k is not None and v is not None
        found = []
        for name, x, first in (("k_cache", k, K_WORD), ("v_cache", v, V_WORD)):
            if x.shape[:3] != k.shape[:3]:
                raise ValueError(f"v_cache: {tuple(v.shape)} does not match k_cache: {tuple(k.shape)}")
            batch, head, row, column = x.stride()
            if column != 1 or (batch | head | row) % ELEMENTS_PER_VECTOR:
                check_layout(device_tensor(name, x))  # strides of dimensions of size 1 mean nothing
            found += [(first + 1, batch), (first + 2, head), (first + 3, row)]
        if not self.is_paged:
            rows = k.shape[2]
            if not 0 < rows <= MAX_LENGTH:
                raise ValueError(f"k_cache: {rows} rows are not allowed; allowed: 1 to {MAX_LENGTH}")
            found.append((LENGTHS_WORD, q.shape[2] | rows << 32))
        return found

    def _launch(self, addresses: list[int], cache_words: Sequence[tuple[int, int]], stream: int) -> None:
        if self.append is not None:
            self.append.launch(addresses, (*cache_words, *self._append_words(cache_words)), stream)
        self.own.launch(addresses, cache_words, stream)

    def _append_words(self, cache_words: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The same of the jobs that write into the cache."""
        if not self.appends_keys:
            return []
        strides = [value for _, value in cache_words[:6]]
        return [
            (target + 1 + axis, strides[3 * job + axis]) for job, target in enumerate(_TARGETS) for axis in range(3)
        ]


def _cache_view(q: torch.Tensor, cache: CacheTensors, appended: int) -> CacheView:
    def place(index: int) -> int:
        return 0 if cache[index] is None else _marker(4 + index)

    table, starts = cache.page_table, cache.q_starts
    return CacheView(
        q.shape[0] if starts is None else len(starts) - 1,
        kv_lengths=place(0),
        appended_keys=appended,
        kv_begins=place(1),
        cache_index=place(2),
        page_table=place(3),
        pages_per_sequence=0 if table is None else table.shape[1],
        page_table_stride=0 if table is None else table.stride(0),
        q_starts=place(4),
        max_q_length=cache.max_q_length,
    )


def _append(launch: DecodeLaunch, views: list[DeviceTensor], attended_q: DeviceTensor, new: NewRows) -> AppendLaunch:
    q, k_cache, v_cache, _ = views

    def view(name: str, x: torch.Tensor | None, index: int) -> DeviceTensor | None:
        if x is None:
            return None
        return DeviceTensor(name, _marker(index), DType.parse(str(x.dtype)), tuple(x.shape), tuple(x.stride()))

    rotary = None
    if new.cosines is not None:
        positions, half = new.cosines.shape
        rotary = Rotary(_marker(11), _marker(12), positions, 2 * half, new.interleaved)
    return append_launch(
        launch,
        k_cache,
        v_cache,
        k=view("k", new.k, 9),
        v=view("v", new.v, 10),
        q=q if rotary is not None else None,
        rotated_q=attended_q if rotary is not None else None,
        rotary=rotary,
        advances=new.advances,
    )
