"""What a launch of a decode kernel is given, checked and packed; the same for a GPU and for the simulator."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Protocol

from flashwright.kernels.forward.launch import NO_OPTIONS, ForwardArguments, forward_arguments, forward_variant
from flashwright.kernels.launch import Blocking, Grid, LaunchRules, Sizes
from flashwright.kernels.operation import Operation
from flashwright.kernels.tensors import DeviceTensor, check_layout
from flashwright.problem.lengths import MAX_LENGTH
from flashwright.problem.options import AttentionOptions
from flashwright.problem.variant import AttentionVariant

ITEM_OVERHEAD = 2
"""What it costs to begin and to end an item, in units. It counts where thread blocks have several items; where they
have parts of one, each of them begins and ends once."""
MOST_PLACES = 2**32 - 1
"""The kernels count units of all sequences and heads in 32 bits."""
PAGE_STEP = 16
"""Pages have a multiple of so many keys."""
LEAST_ROUNDS = 3
"""Equal items are dealt in rounds where there are so many for every thread block. Of 136 items for 132, on an H200, it
is faster to cut all than to cut four."""


class DecodeArguments(ctypes.Structure):
    """`DecodeArguments` of decode_arguments.cuh."""

    _fields_ = (
        ("forward", ForwardArguments),
        ("kv_lengths", ctypes.c_uint64),
        ("kv_begins", ctypes.c_uint64),
        ("cache_index", ctypes.c_uint64),
        ("page_table", ctypes.c_uint64),
        ("page_table_stride", ctypes.c_int64),
        ("page_rows", ctypes.c_int32),
        ("cache_size", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("row_tiles", ctypes.c_int32),
        ("appended_keys", ctypes.c_int32),
        ("item_overhead", ctypes.c_int32),
        ("line_blocks", ctypes.c_int32),
        ("split_units", ctypes.c_int32),
        ("partial_O", ctypes.c_uint64),
        ("partial_terms", ctypes.c_uint64),
        ("progress", ctypes.c_uint64),
        ("whole_items", ctypes.c_int32),
        ("round_blocks", ctypes.c_int32),
    )


class Splitting(Blocking, Protocol):
    """What a launch depends on of a config: B_r packed rows a tile, B_c keys a unit."""

    @property
    def blocks_per_sm(self) -> int: ...


@dataclass(frozen=True)
class CacheView:
    """Which keys each sequence has in a cache, as far as they are known to the host. Addresses are of int32 arrays on
    the device; 0: there is none."""

    sequences: int
    kv_lengths: int = 0
    """Of each sequence, less what was appended since; all that the cache holds, if there is none."""
    appended_keys: int = 0
    kv_begins: int = 0
    """The first key of each."""
    cache_index: int = 0
    """Which of the cache's sequences each one has, if it is not paged."""
    page_table: int = 0
    """(sequences, pages of the longest) numbers of pages: the cache's batch dimension counts pages, and its rows are a
    page's."""
    pages_per_sequence: int = 0
    page_table_stride: int = 0
    q_starts: int = 0
    """Where each sequence begins in a q of batch 1, sequences + 1 of them; dense, if there is none."""
    max_q_length: int = 0
    """Of ragged sequences."""


@dataclass(frozen=True)
class DecodeScratch:
    """Memory that a decode works in."""

    zeros: int
    """Words of 4 bytes that must be zero before the first launch, and that every launch leaves so: two of each item,
    for how far it is (`Progress` of parts.cuh)."""
    partial_terms: int
    """Where they begin among the partial results, in bytes."""
    partial_bytes: int

    ALIGNMENT = 256

    @classmethod
    def of(cls, config: Splitting, items: int, slots: int) -> DecodeScratch:
        rows = slots * config.B_r
        terms = -(-4 * rows * config.d_head // cls.ALIGNMENT) * cls.ALIGNMENT
        return cls(2 * items, terms, terms + 8 * rows)


@dataclass(frozen=True)
class DecodeLaunch:
    variant: AttentionVariant
    grid: Grid
    arguments: DecodeArguments

    @property
    def parameters(self) -> tuple[ctypes.Structure, ...]:
        return (self.arguments,)


def decode_scratch(
    config: Splitting,
    q: DeviceTensor,
    k: DeviceTensor,
    cache: CacheView,
    *,
    multiprocessors: int,
    split_units: int = 0,
) -> DecodeScratch:
    _, items = _items(config, q, k, cache)
    slots = 2 * multiprocessors * config.blocks_per_sm
    if split_units:
        units = -(-_capacity(k, cache) // config.B_c) + 1  # a window may begin within a unit
        slots = items * -(-units // split_units)
    return DecodeScratch.of(config, items, slots)


def decode_launch(
    rules: LaunchRules,
    config: Splitting,
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    o: DeviceTensor,
    *,
    cache: CacheView,
    partials_address: int,
    zeros_address: int,
    multiprocessors: int,
    options: AttentionOptions = NO_OPTIONS,
    lse_address: int = 0,
    split_units: int = 0,
) -> DecodeLaunch:
    """How to compute `o` from `q` and a cache of keys and values, all checked here."""
    _check(config, q, k, v, o, cache)
    if rules.values_in_keys and v.shape[3] > (most := min(rules.values_in_keys, k.shape[3])):
        raise ValueError(
            f"{v.name}: head_dim is {v.shape[3]}; allowed: up to {most}, which are the first columns of {k.name}"
        )
    for tensor in (q, k, v, o):
        check_layout(tensor)
    options.check()
    variant = forward_variant(
        config,
        options,
        head_dim=q.shape[3],
        grouped_heads=q.shape[1] != k.shape[1],
        packed=cache.q_starts != 0,
        returns_lse=lse_address != 0,
    )
    if v.shape[3] != q.shape[3]:
        variant = replace(variant, value_head_dim=v.shape[3])
    sizes = Sizes(cache.sequences, q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    forward = forward_arguments(config, q, k, v, o, sizes, options, lse_address, None)
    forward.kv_length = _capacity(k, cache)
    forward.q_starts = cache.q_starts
    if cache.q_starts:
        forward.lse_batch_stride = 0
    row_tiles, items = _items(config, q, k, cache)
    scratch = decode_scratch(config, q, k, cache, multiprocessors=multiprocessors, split_units=split_units)
    places = items * (ITEM_OVERHEAD + 1 + -(-_capacity(k, cache) // config.B_c))
    if places > MOST_PLACES:
        raise ValueError(
            f"the cache has room for {places} units of {config.B_c} keys of all sequences and heads; allowed: up to "
            f"{MOST_PLACES}. Split the batch"
        )
    blocks = multiprocessors * config.blocks_per_sm
    varies = bool(cache.kv_lengths or cache.kv_begins or cache.q_starts or row_tiles > 1)
    deals = rules.deals_items and not (varies or split_units)
    dealing = Dealing.of(items, blocks, multiprocessors, deals=deals)
    return DecodeLaunch(
        variant=variant,
        grid=(blocks, 1, 1),
        arguments=DecodeArguments(
            forward,
            kv_lengths=cache.kv_lengths,
            kv_begins=cache.kv_begins,
            cache_index=cache.cache_index,
            page_table=cache.page_table,
            page_table_stride=cache.page_table_stride,
            page_rows=k.shape[2],
            cache_size=k.shape[0],
            kv_heads=k.shape[1],
            row_tiles=row_tiles,
            appended_keys=cache.appended_keys,
            item_overhead=ITEM_OVERHEAD if items > blocks and not (split_units or dealing.whole_items) else 0,
            line_blocks=dealing.line_blocks,
            split_units=split_units,
            partial_O=partials_address,
            partial_terms=partials_address + scratch.partial_terms,
            progress=zeros_address,
            whole_items=dealing.whole_items,
            round_blocks=dealing.round_blocks,
        ),
    )


DECODE = Operation("decode", decode_launch, reads_cache=True, one_tile={"multiprocessors": 1})


@dataclass(frozen=True)
class Dealing:
    """Which thread blocks have which items. Many that are known to be equal are dealt in rounds: thread block b has
    items b, b + round_blocks, … below `whole_items`. `line_blocks` share the others, which stand in the line."""

    whole_items: int
    round_blocks: int
    line_blocks: int

    @classmethod
    def of(cls, items: int, blocks: int, multiprocessors: int, *, deals: bool) -> Dealing:
        sharing = _line_blocks(blocks, multiprocessors, items)
        if not deals or items < LEAST_ROUNDS * sharing:
            return cls(0, sharing, sharing)
        left = items % sharing
        return cls(items - left, sharing, _line_blocks(blocks, multiprocessors, left) if left else sharing)


def _line_blocks(blocks: int, multiprocessors: int, items: int) -> int:
    """How many of so many thread blocks share the items. Where these are equally long, a share should be a whole number
    of them, or a whole part of one: fewer segments begin and end. For that some thread blocks may have nothing to do,
    but not more than one in twenty multiprocessors."""
    per_block = -(-items // blocks)
    aligned = blocks // items * items if per_block == 1 else items // per_block if items % per_block == 0 else blocks
    return aligned if 20 * aligned >= 19 * multiprocessors else blocks


def _capacity(k: DeviceTensor, cache: CacheView) -> int:
    """The most keys that a sequence can have."""
    return cache.pages_per_sequence * k.shape[2] if cache.page_table else k.shape[2]


def _items(config: Splitting, q: DeviceTensor, k: DeviceTensor, cache: CacheView) -> tuple[int, int]:
    """Tiles of packed rows of the longest sequence, and how many there are of all sequences and heads."""
    q_length = cache.max_q_length if cache.q_starts else q.shape[2]
    row_tiles = max(1, -(-q_length * (q.shape[1] // k.shape[1]) // config.B_r))
    return row_tiles, row_tiles * cache.sequences * k.shape[1]


def _check(
    config: Splitting, q: DeviceTensor, k: DeviceTensor, v: DeviceTensor, o: DeviceTensor, cache: CacheView
) -> None:
    for tensor in (q, k, v, o):
        if len(tensor.shape) != 4:
            raise ValueError(
                f"{tensor.name}: shape {tensor.shape} has {len(tensor.shape)} dimensions; expected 4: (batch, heads, "
                "rows, head_dim)"
            )
        if tensor.dtype != config.dtype:
            raise ValueError(
                f"{tensor.name}: dtype is {tensor.dtype.name}, but the config computes {config.dtype.name}"
            )
        if not 0 < tensor.shape[3] <= config.d_head or tensor.shape[3] % 8:
            raise ValueError(
                f"{tensor.name}: head_dim is {tensor.shape[3]}; allowed: multiples of 8 up to d_head = {config.d_head}"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{tensor.name}: shape {tensor.shape} has no elements, which leaves nothing to compute")
    if k.shape[:3] != v.shape[:3] or q.shape[:3] != o.shape[:3]:
        raise ValueError(
            f"k and v, q and out must agree in all but their head dimensions; got {k.shape}, {v.shape}; {q.shape}, "
            f"{o.shape}"
        )
    if q.shape[3] != k.shape[3] or v.shape[3] != o.shape[3]:
        raise ValueError(
            f"q and k, v and out must agree in their head dimensions; got {q.shape[3]}, {k.shape[3]}; {v.shape[3]}, "
            f"{o.shape[3]}"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, which is not a multiple of the {k.shape[1]} heads of k and v")
    if cache.page_table and k.shape[2] % PAGE_STEP:
        raise ValueError(f"pages of {k.shape[2]} keys are not allowed; allowed: multiples of {PAGE_STEP}")
    if not 0 < _capacity(k, cache) <= MAX_LENGTH or q.shape[2] > MAX_LENGTH:
        raise ValueError(f"{max(_capacity(k, cache), q.shape[2])} rows are not allowed; allowed: 1 to {MAX_LENGTH}")
    if cache.q_starts and q.shape[0] != 1:
        raise ValueError(f"ragged queries need a q of batch 1; got {q.shape[0]}")
    if not cache.q_starts and q.shape[0] != cache.sequences:
        raise ValueError(f"q has batch {q.shape[0]}, but there are {cache.sequences} sequences")
    if not (cache.page_table or cache.cache_index) and k.shape[0] != cache.sequences:
        raise ValueError(f"the cache holds {k.shape[0]} sequences, but there are {cache.sequences}")
