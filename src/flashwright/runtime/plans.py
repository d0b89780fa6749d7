"""Launch plans: what a call decides once and repeats, kept apart from what changes from call to call.

A `CallKind` is what a caller requests, shapes and strides apart. Within it, a `Plan` is a kernel on a GPU, and an
`Arrangement` its packed parameters for tensors of certain shapes and strides. A call like one before copies the
parameters and fills in addresses. A call of new lengths copies those of another, and writes over what lengths and
strides decide; it neither compiles nor calls the driver.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from flashwright.hardware.units import VECTOR_BYTES
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.launch import (
    MAX_BLOCKS,
    ForwardArguments,
    ForwardLaunch,
    PackedSequences,
    check_row_stride,
    check_tiles,
    map_strides,
)
from flashwright.kernels.launch import Grid, Sizes
from flashwright.kernels.registry import family_of
from flashwright.kernels.tensors import check_layout
from flashwright.problem.lengths import MAX_LENGTH, bucket_bounds, length_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import check_shapes, is_empty
from flashwright.runtime.devices import multiprocessors
from flashwright.runtime.few_rows import FewRows, FewRowsArrangement
from flashwright.runtime.loaded import LoadedKernel, loaded_kernel
from flashwright.runtime.parameters import WORD_BYTES, Parameters, kind_of_map, words_of
from flashwright.runtime.tensor_maps import WORDS, map_template, placed_rows, words_of_rows
from flashwright.runtime.tensors import (
    VECTOR_MASK,
    Allocate,
    Packed,
    allocator,
    device_tensor,
    empty_output,
    in_vectors,
    placed_anywhere,
    with_vector_rows,
)

if TYPE_CHECKING:
    import torch

Choose = Callable[[int, int, int], KernelConfig]
"""The config for a head dimension and the lengths of queries and keys; the same within a bucket of lengths."""
Schedule: TypeAlias = "array[int] | tuple[int, int]"
"""Words of a schedule: all of them, or the first two, where a rule of the kernel's own serves."""
Tiles: TypeAlias = "tuple[Grid, Schedule | None, int]"
"""A grid; a schedule, if the kernel takes one; and `runs` to begin with (see `Arrangement`)."""


def _word(name: str) -> int:
    return int(getattr(ForwardArguments, name).offset) // WORD_BYTES


class CallKind:
    """Calls that differ in the shapes, strides and addresses of their tensors only."""

    MOST_ARRANGEMENTS = 4096

    def __init__(
        self,
        options: AttentionOptions,
        choose: Choose,
        *,
        returns_lse: bool,
        device_index: int,
        few_rows: FewRows | None = None,
    ) -> None:
        """`few_rows`: what computes those of the calls that decode kernels are for; None: the forward computes all."""
        import torch

        self.torch = torch
        self.options = options
        self.returns_lse = returns_lse
        self.device_index = device_index
        self.arrangements: dict[tuple[Any, ...], Arrangement | FewRowsArrangement | CopiesFirst] = {}
        """By shape and strides of q, k and v; then, where given, by strides of the output, by `Packed`, and by strides
        of the log-sum-exps that results are mixed into."""
        self._choose = choose
        self._few_rows = few_rows
        self._copies_first = CopiesFirst(self)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._latest: Arrangement | None = None
        """Of tensors that are neither packed nor written to a given output."""
        self._latest_of_buckets: dict[tuple[str, str], Arrangement] = {}

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        packed: Packed | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queues a launch for tensors that are not empty; returns the output and, if requested, the log-sum-exp. Given
        `lse`, results are mixed into it and into `out`, fp32 sums seen as twice as many columns of q's dtype."""
        o = self.torch.empty_like(q) if out is None else out
        layout: tuple[Any, ...] = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
        if out is not None or packed is not None:
            layout = (*layout, None if out is None else out.stride(), packed)
            if lse is not None:
                layout = (*layout, lse.stride())
        arrangement = self.arrangements.get(layout) or self.arrange(layout, q, k, v, o, packed)
        assert arrangement is not None
        if lse is None:
            return arrangement.run(q, k, v, o, starts, packed)
        assert not isinstance(arrangement, FewRowsArrangement)
        return arrangement.run(q, k, v, o, starts, packed, lse)

    def arrange(
        self,
        layout: tuple[Any, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        packed: Packed | None = None,
    ) -> Arrangement | FewRowsArrangement | CopiesFirst | None:
        """For tensors of a new layout, everything checked; None if they are empty, or values have a head dimension of
        their own. Raises `ValueError` for what is not attention's."""
        if len(self.arrangements) >= self.MOST_ARRANGEMENTS:
            self.arrangements.clear()
        latest, few_rows, q_shape = self._latest, self._few_rows, layout[0]
        if (
            latest is not None
            and len(layout) == 6
            and (few_rows is None or (len(q_shape) == 4 and q_shape[2] > few_rows.most_rows))
            and (near := latest.of_other_lengths(layout, out)) is not None
        ):
            self.arrangements[near.layout] = self._latest = near
            return near
        return self._arrange(layout, q, k, v, out, packed)

    def _arrange(
        self,
        layout: tuple[Any, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        packed: Packed | None,
    ) -> Arrangement | FewRowsArrangement | CopiesFirst | None:
        """The same for tensors that are not near the latest."""
        q_shape, k_shape, v_shape = layout[0], layout[2], layout[4]
        buckets = None
        if len(layout) == 6 and len(q_shape) == len(k_shape) == 4:  # neither packed nor written to a given output
            if self._few_rows is not None and q_shape[2] <= self._few_rows.most_rows:
                few = self._few_rows.arrange(layout, q, k, v, out, self._copies_first)
                if few is not None:
                    self.arrangements[layout] = few
                    return few
            buckets = length_bucket(q_shape[2]), length_bucket(k_shape[2])
            latest = self._latest_of_buckets.get(buckets)
            near = None if latest is None else latest.of_other_lengths(layout, out)
            if near is not None:
                self.arrangements[near.layout] = self._latest = self._latest_of_buckets[buckets] = near
                return near
        other_values = k_shape[:3] == v_shape[:3] and k_shape != v_shape
        if buckets is not None and (other_values or is_empty(q_shape, k_shape)):
            return None
        check_shapes(q_shape, k_shape, v_shape)
        if q_shape[2] > MAX_LENGTH or k_shape[2] > MAX_LENGTH:
            raise ValueError(f"{max(q_shape[2], k_shape[2])} rows are not allowed; allowed: up to {MAX_LENGTH}")
        if packed is not None and q_shape[0] != 1:
            raise ValueError(f"packed sequences need tensors of batch 1; got {q_shape[0]}")
        if len(layout) > 6 and layout[6] is not None:  # the caller's own output
            check_layout(device_tensor("out", out))
        found: Arrangement | CopiesFirst
        if all(in_vectors(x) for x in (q, k, v, out)):
            lse_strides = layout[8][:2] if len(layout) > 8 else None
            found = self._plan(q, k, v, out, packed, lse_strides).arranged(layout, out.stride(), packed, lse_strides)
            if buckets is not None:
                self._latest = self._latest_of_buckets[buckets] = found
        else:
            found = self._copies_first
        self.arrangements[layout] = found
        return found

    def _plan(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        packed: Packed | None,
        lse_strides: tuple[int, int] | None,
    ) -> Plan:
        head_dim, q_length, kv_length = q.shape[3], q.shape[2], k.shape[2]
        if packed is not None:
            _, q_length, kv_length = packed
        key = (
            q.dtype, head_dim, q.shape[1] == k.shape[1], packed is None, length_bucket(q_length),
            length_bucket(kv_length), lse_strides is None,
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            config = self._choose(head_dim, q_length, kv_length)
            launch = self._launch(config, q, k, v, out, packed, lse_strides)
            plan = self._plans[key] = Plan(
                self, config, launch, bucket_bounds(q_length), bucket_bounds(kv_length), allocator(q.device.type)
            )
        return plan

    def _launch(
        self,
        config: KernelConfig,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        packed: Packed | None,
        lse_strides: tuple[int, int] | None,
    ) -> ForwardLaunch:
        launch: ForwardLaunch = family_of(config).launch(
            config,
            *(placed_anywhere(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("out", out))),
            lse_address=int(self.returns_lse),
            options=self.options,
            packed=None if packed is None else PackedSequences(packed[0], 0, 0, packed[1], packed[2]),
            lse_strides=lse_strides,
            multiprocessors=multiprocessors(self.device_index),
        )
        return launch


class Plan:
    """A kernel on a GPU with the parameters of one launch, from which those of others are made."""

    def __init__(
        self,
        kind: CallKind,
        config: KernelConfig,
        launch: ForwardLaunch,
        rows: tuple[int, int],
        keys: tuple[int, int],
        allocate: Allocate,
    ) -> None:
        """`rows`, `keys`: the least and the most that the config was chosen for."""
        self.kind = kind
        self.torch = kind.torch
        self.device_index = kind.device_index
        self.returns_lse = kind.returns_lse
        self.config = config
        self.B_r = config.B_r
        self.variant = launch.variant
        self.kernel: LoadedKernel = loaded_kernel(config, launch.variant, kind.device_index)
        self.launch = self.kernel.launch
        self.rules = family_of(config).launch_rules
        self.row_stride = self.rules.row_stride(config)
        self.allocate = allocate
        self.least_rows, self.most_rows = rows
        self.least_keys, self.most_keys = keys
        self.has_several_rows = self.least_rows > 1 < self.least_keys
        self.multiprocessors = multiprocessors(kind.device_index)
        self.maps = [map_template(kind_of_map(each)) for each in launch.tensor_maps]
        # The parameters one after the other in 8-byte words: tensor maps, arguments, perhaps a schedule.
        self.words = array("Q", [word for template in self.maps for word in template.blank])
        self.row_places = placed_rows(self.maps)
        self.arguments = len(self.maps) * WORDS
        self.output_and_sizes = (self.arguments + _word("O") + 1) * WORD_BYTES
        self.words.extend(words_of(launch.arguments))
        self.schedule = None if launch.schedule is None else words_of(launch.schedule)
        self.schedule_word = len(self.words)
        self.before_schedule = slice(0, len(self.words))
        self.spare: list[Parameters] = []
        """Those that no launch is using. A thread that finds none makes its own, and leaves them here."""
        self.deals_tiles = self.rules.deals_tiles(config, launch.variant)
        self.known_tiles: dict[tuple[int, int, int], Tiles] = {}
        """By blocks of query rows, heads and batches: many lengths have as many tiles."""
        self.q, self.k, self.v, self.o, self.lse, self.q_starts, self.kv_starts = (
            self.arguments + _word(name) for name in ("Q", "K", "V", "O", "lse", "q_starts", "kv_starts")
        )
        if self.maps:  # the kernel finds its inputs by their tensor maps instead
            self.q, self.k, self.v = (index * WORDS + template.address_word for index, template in enumerate(self.maps))

    def arranged(
        self,
        layout: tuple[Any, ...],
        out_strides: Sequence[int],
        packed: Packed | None,
        lse_strides: tuple[int, int] | None = None,
    ) -> Arrangement:
        """The parameters for tensors that the kernel can read; raises `ValueError` for more than a launch can have."""
        q_shape, q_strides, k_shape, k_strides, _, v_strides = layout[:6]
        batch, q_heads, q_rows, head_dim = q_shape
        _, kv_heads, kv_rows, _ = k_shape
        batches, q_length, kv_length = packed or (batch, q_rows, kv_rows)
        q_length, kv_length = max(1, q_length), max(1, kv_length)  # a launch needs a tile, even of no rows
        sizes = Sizes(batches, q_heads, kv_heads, q_length, kv_length, None if packed is None else q_rows)
        for name, rows, strides in zip(
            ("q", "k", "v", "out"), (q_rows, kv_rows, kv_rows, q_rows), (q_strides, k_strides, v_strides, out_strides),
            strict=True,
        ):  # fmt: skip
            if name != "out" or lse_strides is None:
                check_row_stride(self.row_stride, name, rows, strides[2])
        check_tiles(self.config, sizes)
        q_blocks = sizes.q_blocks(self.config)
        words = self.words[:]
        first = self.arguments
        for tensor, strides in ((_Q, q_strides), (_K, k_strides), (_V, v_strides), (_O, out_strides)):
            words[first + tensor + 1 : first + tensor + 4] = array("Q", strides[:3])
            if packed is not None:
                words[first + tensor + 1] = 0  # a sequence is found by its first row
        lse_batch_stride, lse_head_stride = lse_strides or (q_heads * q_rows, q_rows)
        words[first + _LSE_BATCH_STRIDE] = lse_batch_stride if packed is None else 0
        words[first + _LSE_HEAD_STRIDE] = lse_head_stride
        words[first + _LENGTHS] = q_rows | kv_rows << 32
        words[first + _HEADS] = q_heads | q_heads // kv_heads << 32
        words[first + _BLOCKS] = q_blocks | batches << 32
        for index, (template, shape, strides) in enumerate(
            zip(self.maps, (q_shape, k_shape, k_shape), (q_strides, k_strides, v_strides), strict=False)
        ):
            template.write(words, index * WORDS, shape[::-1], map_strides(shape, strides))
        kept = (batch, q_heads, kv_heads, head_dim)
        return Arrangement(self, layout, words, self.tiles(q_blocks, q_heads, sizes.lines), kept, q_rows, kv_rows)

    def new_parameters(self) -> Parameters:
        words, first_words = self.words[:], [*range(0, self.arguments + 1, WORDS)]
        if self.schedule is not None:
            first_words.append(len(words))
            words.extend(self.schedule)
        return Parameters(words, first_words)

    def tiles(self, q_blocks: int, heads: int, lines: int) -> Tiles:
        """The grid for so many tiles, and a schedule that suits all lengths with as many."""
        found = self.known_tiles.get((q_blocks, heads, lines))
        if found is None:
            if len(self.known_tiles) >= self.kind.MOST_ARRANGEMENTS:
                self.known_tiles.clear()
            grid = self.rules.grid(self.config, q_blocks, heads, lines, self.multiprocessors)
            found = self.known_tiles[q_blocks, heads, lines] = (grid, *self._schedule(q_blocks, heads, lines, grid))
        return found

    def _schedule(self, q_blocks: int, heads: int, lines: int, grid: Grid) -> tuple[Schedule | None, int]:
        """With the runs to begin with."""
        if self.schedule is None:
            return None, BALANCED
        by_rule = self.rules.schedule_by_rule(q_blocks, heads, lines)
        if not self.deals_tiles:
            return by_rule, BALANCED
        if q_blocks * heads * lines > grid[0]:
            return by_rule, 0
        # A thread block for each tile: whatever the lengths, none has more than one.
        rows = q_blocks * self.B_r
        return self.balanced_schedule(Sizes(lines, heads, heads, rows, rows), grid), BALANCED

    def balanced_schedule(self, sizes: Sizes, grid: Grid) -> array[int]:
        """Balances thread blocks as well as the family can, which takes longer than a call."""
        assert self.rules.schedule is not None
        return words_of(self.rules.schedule(self.config, self.variant, sizes, self.kind.options.window, grid[0]))


BALANCED = 2
"""Runs after which a schedule is not improved any more."""
_Q, _K, _V, _O = (_word(name) for name in "QKVO")
_LSE_BATCH_STRIDE, _LSE_HEAD_STRIDE = _word("lse_batch_stride"), _word("lse_head_stride")
_LENGTHS, _HEADS, _BLOCKS = _word("q_length"), _word("q_heads"), _word("q_blocks")
_write_output_and_sizes = struct.Struct("=3qQ2q2Q6i").pack_into
"""The fields of `ForwardArguments` from the output's strides on: those, the log-sum-exp's address and strides, starts,
lengths, heads, heads for each of k's, blocks and batches."""


class Arrangement:
    """A plan's parameters for tensors of certain shapes and strides, addresses apart."""

    __slots__ = (
        "grid",
        "kv_rows",
        "layout",
        "plan",
        "q_rows",
        "rows_words",
        "runs",
        "schedule",
        "sizes",
        "tiles",
        "words",
    )

    def __init__(
        self,
        plan: Plan,
        layout: tuple[Any, ...],
        words: array[int],
        tiles: Tiles,
        sizes: tuple[int, int, int, int],
        q_rows: int,
        kv_rows: int,
        rows_words: Sequence[int] | None = None,
    ) -> None:
        self.plan = plan
        self.layout = layout
        self.words = words
        self.tiles = tiles
        self.grid, self.schedule, self.runs = tiles
        """`runs`: how often it has run, up to `BALANCED`. Then the schedule is not improved any more."""
        self.sizes = sizes
        """Batch, heads of q, heads of k, head dimension."""
        self.q_rows = q_rows
        self.kv_rows = kv_rows
        self.rows_words = rows_words
        """`words_of_rows` of the tensor maps; None: not found yet."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        packed: Packed | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queues the launch on the current stream; returns the output and, if it is computed, the log-sum-exp."""
        plan = self.plan
        torch = plan.torch
        index = plan.device_index
        # What torch.cuda.current_device() gives, without asking whether CUDA is initialised.
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.run(q, k, v, out, starts, packed, lse)
        if self.runs < BALANCED:
            self.runs += 1
            if self.runs == BALANCED:  # lengths that come again
                batch, q_heads, kv_heads, _ = self.sizes
                sizes = Sizes(batch, q_heads, kv_heads, self.q_rows, self.kv_rows)
                self.schedule = plan.balanced_schedule(sizes, self.grid)
        q_address, k_address, v_address, o_address = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        if (q_address | k_address | v_address | o_address) % VECTOR_BYTES:
            return CopiesFirst(plan.kind).run(q, k, v, out, starts, packed, lse)
        try:
            parameters = plan.spare.pop()
        except IndexError:
            parameters = plan.new_parameters()
        words = parameters.words
        words[plan.before_schedule] = self.words
        schedule = self.schedule
        if parameters.schedule is not schedule and schedule is not None:
            parameters.schedule = schedule
            at = plan.schedule_word
            if isinstance(schedule, tuple):
                words[at], words[at + 1] = schedule
            else:
                words[at : at + len(schedule)] = schedule
        words[plan.q] = q_address
        words[plan.k] = k_address
        words[plan.v] = v_address
        words[plan.o] = o_address
        if plan.returns_lse:
            if lse is None:
                batch, heads, _, _ = self.sizes
                rows = self.q_rows
                lse = plan.allocate((batch, heads, rows), (heads * rows, rows, 1), torch.float32)
            words[plan.lse] = lse.data_ptr()
        if starts is not None:
            words[plan.q_starts], words[plan.kv_starts] = starts[0].data_ptr(), starts[1].data_ptr()
        # What torch.cuda.current_stream(index).cuda_stream gives, without building a Stream object.
        plan.launch(self.grid, parameters.address, torch._C._cuda_getCurrentRawStream(index))
        plan.spare.append(parameters)
        return out, lse

    def of_other_lengths(self, layout: tuple[Any, ...], out: torch.Tensor) -> Arrangement | None:
        """The same for tensors of other lengths or strides, in the same buckets; None if more is different.

        Every step of a generation runs this, so it repeats what `Plan.arranged` does, for the usual cases, and writes
        only what differs. The first touch of memory takes longer than the arithmetic: what is equal is kept once.
        """
        q_shape, q_strides, k_shape, k_strides, v_shape, v_strides = layout
        _, old_q_strides, _, old_k_strides, _, old_v_strides = self.layout
        try:
            q_batch, heads, q_rows, q_dim = q_shape
            batch, kv_heads, kv_rows, head_dim = k_shape
        except ValueError:  # not of four dimensions
            return None
        plan, sizes, old_q_rows = self.plan, self.sizes, self.q_rows
        old_batch, old_heads, old_kv_heads, old_head_dim = sizes
        if (
            k_shape != v_shape
            or not q_dim == head_dim == old_head_dim
            or heads != old_heads
            or kv_heads != old_kv_heads
            or q_batch != batch
            or not batch
            or not plan.least_rows <= q_rows <= plan.most_rows
            or not plan.least_keys <= kv_rows <= plan.most_keys
            or plan.row_stride
        ):
            return None
        words, first = self.words[:], plan.arguments
        same_maps = same_but_rows = batch == old_batch
        if not same_but_rows:
            sizes = batch, heads, kv_heads, head_dim
        if q_strides == old_q_strides and k_strides == old_k_strides and v_strides == old_v_strides:
            q_strides, k_strides, v_strides = old_q_strides, old_k_strides, old_v_strides
        elif (
            _write_strides(words, first + _Q + 1, q_strides)
            and _write_strides(words, first + _K + 1, k_strides)
            and _write_strides(words, first + _V + 1, v_strides)
        ):
            same_but_rows = False
            same_maps = bool(
                plan.maps
                and batch == old_batch == 1  # whose stride means nothing
                and q_strides[1:] == old_q_strides[1:]
                and k_strides[1:] == old_k_strides[1:]
                and v_strides[1:] == old_v_strides[1:]
            )
        else:
            return None
        if same_but_rows and q_rows == old_q_rows:
            words[first + _LENGTHS] = q_rows | kv_rows << 32
            tiles = self.tiles
        else:
            q_blocks = -(-q_rows // plan.B_r)
            known = plan.known_tiles.get((q_blocks, heads, batch))
            if known is None and q_blocks * heads * batch > MAX_BLOCKS:
                return None
            tiles = known or plan.tiles(q_blocks, heads, batch)
            o_batch, o_head, o_row, o_column = out.stride()
            if o_column != 1 or (o_batch | o_head | o_row) & VECTOR_MASK:
                return None
            _write_output_and_sizes(
                words, plan.output_and_sizes, o_batch, o_head, o_row, 0, heads * q_rows, q_rows, 0, 0,
                q_rows, kv_rows, heads, heads // kv_heads, q_blocks, batch,
            )  # fmt: skip
        rows_words = None
        if plan.maps:
            # A map of one row has no row stride.
            same_maps = same_maps and (
                plan.has_several_rows
                or (kv_rows > 1 < self.kv_rows and (q_rows == old_q_rows or q_rows > 1 < old_q_rows))
            )
            if same_maps and plan.row_places:
                rows_words = self.rows_words or words_of_rows(self.words, plan.row_places)
                q_at, q_rest, q_up, k_at, k_rest, k_up, v_at, v_rest, v_up = rows_words
                words[q_at] = q_rest | q_rows - 1 << q_up
                words[k_at] = k_rest | kv_rows - 1 << k_up
                words[v_at] = v_rest | kv_rows - 1 << v_up
            else:
                Q, K, V = plan.maps
                Q.write(words, 0, q_shape[::-1], map_strides(q_shape, q_strides))
                K.write(words, WORDS, k_shape[::-1], map_strides(k_shape, k_strides))
                if V is K and v_strides == k_strides:
                    words[2 * WORDS : 3 * WORDS] = words[WORDS : 2 * WORDS]
                else:
                    V.write(words, 2 * WORDS, k_shape[::-1], map_strides(k_shape, v_strides))
        # Whatever tiles were dealt, all are computed: how many keys they attend to decides only how evenly.
        layout = (q_shape, q_strides, k_shape, k_strides, k_shape, v_strides)
        return Arrangement(plan, layout, words, tiles, sizes, q_rows, kv_rows, rows_words)


def _write_strides(words: array[int], at: int, strides: Sequence[int]) -> bool:
    """False if rows are not made of 16-byte vectors."""
    batch, head, row, column = strides
    if column != 1 or (batch | head | row) & VECTOR_MASK:
        return False
    words[at] = batch
    words[at + 1] = head
    words[at + 2] = row
    return True


class CopiesFirst:
    """In the place of an arrangement for tensors whose rows the kernel cannot move in 16-byte vectors."""

    def __init__(self, kind: CallKind) -> None:
        self._kind = kind

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        starts: tuple[torch.Tensor, torch.Tensor] | None = None,
        packed: Packed | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies what must be copied. Room for the output that is laid out as q was is replaced if need be."""
        if not in_vectors(out):
            out = empty_output(q)
        check_layout(device_tensor("out", out))
        q, k, v = (with_vector_rows(x) for x in (q, k, v))
        return self._kind.run(q, k, v, out, starts, packed, lse)
