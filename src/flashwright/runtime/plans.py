"""Launch plans: what a call decides once and repeats, kept apart from what changes from call to call.

A `CallKind` is what a caller requests, shapes and strides apart. Within it, a `Plan` is a kernel on a GPU, and an
`Arrangement` its packed parameters for tensors of certain shapes and strides. A call like one before copies the
parameters and fills in addresses. A call of new lengths finds a `Frame`, what tensors that differ in lengths alone
share, and writes what lengths decide; one of new strides writes over the parameters of another. Neither compiles or
calls the driver.
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
from flashwright.runtime.tensor_maps import WORDS, common_rows_place, map_template
from flashwright.runtime.tensors import (
    VECTOR_MASK,
    Allocate,
    Packed,
    allocator,
    are_vector_strides,
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
LseLayout: TypeAlias = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Shape and strides of log-sum-exps."""
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
        of the log-sum-exps that results are mixed into. Frames have others, by lengths."""
        self._choose = choose
        self._few_rows = few_rows
        self._least_rows = 1 if few_rows is None else few_rows.most_rows + 1
        """Which the forward computes, however many keys there are."""
        self._copies_first = CopiesFirst(self)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        # Of calls that neither have packed sequences nor give an output.
        self._frame: Frame | None = None
        self._latest_plan: Plan | None = None
        self._latest_plans: dict[tuple[str, str], Plan] = {}
        """By buckets of lengths."""

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
        arrangement: Arrangement | FewRowsArrangement | CopiesFirst | None
        if out is None and packed is None:
            out = self.torch.empty_like(q)
            arrangement = self.arrangement(q, k, v, out)
        else:
            layout: tuple[Any, ...] = (
                q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(),
                None if out is None else out.stride(), packed,
            )  # fmt: skip
            if lse is not None:
                layout = (*layout, lse.stride())
            if out is None:
                out = self.torch.empty_like(q)
            arrangement = self.arrangements.get(layout) or self._arrange(layout, q, k, v, out, packed)
        assert arrangement is not None
        if lse is None:
            return arrangement.run(q, k, v, out, starts, packed)
        assert not isinstance(arrangement, FewRowsArrangement)
        return arrangement.run(q, k, v, out, starts, packed, lse)

    def arrangement(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> Arrangement | FewRowsArrangement | CopiesFirst | None:
        """For a call without packed sequences and with an output like q, everything checked; None if tensors are empty,
        or values have a head dimension of their own. Raises `ValueError` for what is not attention's."""
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
        strides = q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        frame = self._frame
        if frame is not None and strides == frame.strides and k_shape == v_shape:
            # As many strides, so tensors of four dimensions, too.
            batch, heads, q_rows, head_dim = q_shape
            kv_batch, kv_heads, kv_rows, kv_head_dim = k_shape
            if (batch, heads, head_dim, kv_batch, kv_heads, kv_head_dim) == frame.sizes:
                lengths = q_rows | kv_rows << _KEYS_UP
                found = frame.arrangements.get(lengths)
                if found is None:
                    found = frame.arranged(lengths, q_rows, kv_rows, out, self._least_rows)
                if found is not None:
                    return found
        layout = (q_shape, q_strides, k_shape, k_strides, v_shape, v_strides)
        return self.arrangements.get(layout) or self._arrange(layout, q, k, v, out)

    def _arrange(
        self,
        layout: tuple[Any, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        packed: Packed | None = None,
    ) -> Arrangement | FewRowsArrangement | CopiesFirst | None:
        """For tensors of a new layout, which the latest frame does not serve."""
        if len(self.arrangements) >= self.MOST_ARRANGEMENTS:
            self.arrangements.clear()
        q_shape, k_shape, v_shape = layout[0], layout[2], layout[4]
        found: Arrangement | FewRowsArrangement | CopiesFirst | None
        is_plain = len(layout) == 6 and len(q_shape) == len(k_shape) == 4
        if is_plain:  # neither packed nor written to a given output
            if self._few_rows is not None and q_shape[2] <= self._few_rows.most_rows:
                found = self._few_rows.arrange(layout, q, k, v, out, self._copies_first)
                if found is not None:
                    self.arrangements[found.layout] = found
                    return found
            latest = self._latest_plan
            if latest is None or not latest.serves(q_shape[2], k_shape[2]):
                latest = self._latest_plans.get((length_bucket(q_shape[2]), length_bucket(k_shape[2])))
            found = None if latest is None else latest.arranged_like_others(layout, out)
            if latest is not None and found is not None:
                self._latest_plan, self._frame = latest, latest.frame or self._frame
                self.arrangements[layout] = found
                return found
        other_values = k_shape[:3] == v_shape[:3] and k_shape != v_shape
        if is_plain and (other_values or is_empty(q_shape, k_shape)):
            return None
        check_shapes(q_shape, k_shape, v_shape)
        if q_shape[2] > MAX_LENGTH or k_shape[2] > MAX_LENGTH:
            raise ValueError(f"{max(q_shape[2], k_shape[2])} rows are not allowed; allowed: up to {MAX_LENGTH}")
        if packed is not None and q_shape[0] != 1:
            raise ValueError(f"packed sequences need tensors of batch 1; got {q_shape[0]}")
        if len(layout) > 6 and layout[6] is not None:  # the caller's own output
            check_layout(device_tensor("out", out))
        if all(in_vectors(x) for x in (q, k, v, out)):
            lse_strides = layout[8][:2] if len(layout) > 8 else None
            plan = self._plan(q, k, v, out, packed, lse_strides)
            found = plan.arranged(layout, out.stride(), packed, lse_strides)
            if is_plain:
                plan.latest = layout, found
                self._latest_plan = self._latest_plans[length_bucket(q_shape[2]), length_bucket(k_shape[2])] = plan
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
        self.multiprocessors = multiprocessors(kind.device_index)
        self.maps = [map_template(kind_of_map(each)) for each in launch.tensor_maps]
        # The parameters one after the other in 8-byte words: tensor maps, arguments, perhaps a schedule.
        self.words = array("Q", [word for template in self.maps for word in template.blank])
        self.arguments = len(self.maps) * WORDS
        self.output_and_sizes = (self.arguments + _O + 1) * WORD_BYTES
        self.lengths = self.arguments + _LENGTHS
        self.rows_place = common_rows_place(self.maps)
        self.words.extend(words_of(launch.arguments))
        self.schedule = None if launch.schedule is None else words_of(launch.schedule)
        self.schedule_word = len(self.words)
        self.before_schedule = slice(0, len(self.words))
        self.spare: list[Parameters] = []
        """Those that no launch is using. A thread that finds none makes its own, and leaves them here."""
        self.latest: tuple[tuple[Any, ...], Arrangement] | None = None
        """Of calls that neither have packed sequences nor give an output, the latest that no frame served."""
        self.frame: Frame | None = None
        """Of the latest strides that came with a second length."""
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
        batch, q_heads, q_rows, _ = q_shape
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
            if batch == 1:  # whose stride means nothing; packed sequences are found by their first rows
                words[first + tensor + 1] = 0
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
        lse_layout = ((batch, q_heads, q_rows), (q_heads * q_rows, q_rows, 1)) if self.returns_lse else None
        return Arrangement(self, words, self.tiles(q_blocks, q_heads, sizes.lines), lse_layout)

    def serves(self, q_rows: int, kv_rows: int) -> bool:
        """Whether these are lengths that its config was chosen for."""
        return self.least_rows <= q_rows <= self.most_rows and self.least_keys <= kv_rows <= self.most_keys

    def arranged_like_others(self, layout: tuple[Any, ...], out: torch.Tensor) -> Arrangement | None:
        """The same for a call that neither has packed sequences nor gives an output, by the parameters of another; None
        unless they differ in lengths within the plan's buckets, strides and batch at most."""
        if self.latest is None or self.row_stride or (self.maps and self.rows_place is None):
            return None
        q_rows, kv_rows = layout[0][2], layout[2][2]
        lengths = q_rows | kv_rows << _KEYS_UP
        frame, (latest_layout, latest) = self.frame, self.latest
        if frame is not None and _differ_in_lengths_alone(layout, frame.layout):
            found = frame.arrangements.get(lengths) or frame.arranged(lengths, q_rows, kv_rows, out)
            if found is not None:
                return found
        # The stride of a single row means nothing, which may be that of several in a frame.
        if _differ_in_lengths_alone(layout, latest_layout) and all(map(are_vector_strides, layout[1::2])):
            frame = Frame(self, latest_layout, latest)
            found = frame.arranged(lengths, q_rows, kv_rows, out)
            if found is not None:
                self.frame = frame
                return found
        found = self._arranged_anew(latest_layout, latest, layout, out)
        if found is not None:
            self.latest = layout, found
        return found

    def _arranged_anew(
        self, latest_layout: tuple[Any, ...], latest: Arrangement, layout: tuple[Any, ...], out: torch.Tensor
    ) -> Arrangement | None:
        """Writes all that lengths, strides and the batch decide over the latest's parameters. Contiguous tensors come
        here with every new length."""
        (_, latest_heads, _, latest_head_dim), _, (_, latest_kv_heads, _, _), _, _, _ = latest_layout
        q_shape, q_strides, k_shape, k_strides, v_shape, v_strides = layout
        batch, heads, q_rows, head_dim = q_shape
        kv_batch, kv_heads, kv_rows, kv_head_dim = k_shape
        out_strides = out.stride()
        q_blocks = -(-q_rows // self.B_r)
        if (
            k_shape != v_shape
            or not head_dim == kv_head_dim == latest_head_dim
            or heads != latest_heads
            or kv_heads != latest_kv_heads
            or not batch == kv_batch != 0
            or not self.serves(q_rows, kv_rows)
            or q_blocks * heads * batch > MAX_BLOCKS
            or not (are_vector_strides(q_strides) and are_vector_strides(k_strides) and are_vector_strides(v_strides))
            or not are_vector_strides(out_strides)
        ):
            return None
        words, first = latest.words[:], self.arguments
        q_batch, words[first + _Q + 2], words[first + _Q + 3], _ = q_strides
        k_batch, words[first + _K + 2], words[first + _K + 3], _ = k_strides
        v_batch, words[first + _V + 2], words[first + _V + 3], _ = v_strides
        o_batch, o_head, o_row, _ = out_strides
        if batch == 1:
            q_batch = k_batch = v_batch = o_batch = 0
        words[first + _Q + 1], words[first + _K + 1], words[first + _V + 1] = q_batch, k_batch, v_batch
        _write_output_and_sizes(
            words, self.output_and_sizes, o_batch, o_head, o_row, heads * q_rows, q_rows,
            q_rows, kv_rows, heads, heads // kv_heads, q_blocks, batch,
        )  # fmt: skip
        if self.maps:
            Q, K, V = self.maps
            Q.write(words, 0, q_shape[::-1], map_strides(q_shape, q_strides))
            K.write(words, WORDS, k_shape[::-1], map_strides(k_shape, k_strides))
            if V is K and v_strides == k_strides:
                words[2 * WORDS : 3 * WORDS] = words[WORDS : 2 * WORDS]
            else:
                V.write(words, 2 * WORDS, k_shape[::-1], map_strides(k_shape, v_strides))
        lse_layout = ((batch, heads, q_rows), (heads * q_rows, q_rows, 1)) if self.returns_lse else None
        return Arrangement(self, words, self.tiles(q_blocks, heads, batch), lse_layout)

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
_write_output_and_sizes = struct.Struct("=3q8x2q16x6i").pack_into
"""The fields of `ForwardArguments` from the output's strides on: those, the log-sum-exp's address (0) and strides,
starts (0), lengths, heads, heads for each of k's, blocks and batches. All that lengths decide, tensor maps apart."""
_KEYS_UP = 60
"""No tensor has so many rows that it takes more bits."""


class Arrangement:
    """A plan's parameters for tensors of certain shapes and strides, addresses apart."""

    __slots__ = ("grid", "lse_layout", "plan", "runs", "schedule", "words")

    def __init__(self, plan: Plan, words: array[int], tiles: Tiles, lse_layout: LseLayout | None) -> None:
        self.plan = plan
        self.words = words
        self.grid, self.schedule, self.runs = tiles
        """`runs`: how often it has run, up to `BALANCED`. Then the schedule is not improved any more."""
        self.lse_layout = lse_layout
        """Of the log-sum-exps, if they are computed."""

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
                (batch, q_heads, q_rows, _), (_, kv_heads, kv_rows, _) = q.shape, k.shape
                sizes = Sizes(batch, q_heads, kv_heads, q_rows, kv_rows)
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
        if self.lse_layout is not None:
            if lse is None:
                lse = plan.allocate(*self.lse_layout, torch.float32)
            words[plan.lse] = lse.data_ptr()
        if starts is not None:
            words[plan.q_starts], words[plan.kv_starts] = starts[0].data_ptr(), starts[1].data_ptr()
        # What torch.cuda.current_stream(index).cuda_stream gives, without building a Stream object.
        plan.launch(self.grid, parameters.address, torch._C._cuda_getCurrentRawStream(index))
        plan.spare.append(parameters)
        return out, lse


class Frame:
    """What tensors that differ in lengths alone share: a plan, sizes, strides, and parameters, lengths apart."""

    __slots__ = (
        "_batch_and_heads", "_latest", "_least_keys", "_least_rows", "_mapped_rows", "_most_keys", "_most_rows",
        "_plan", "arrangements", "layout", "sizes", "strides",
    )  # fmt: skip

    def __init__(self, plan: Plan, layout: tuple[Any, ...], first: Arrangement) -> None:
        """Of tensors like those of an arrangement, which have this layout."""
        (batch, heads, q_rows, head_dim), q_strides, (_, kv_heads, kv_rows, _), k_strides, _, v_strides = layout
        self.layout = layout
        self.strides = q_strides, k_strides, v_strides
        self.sizes = batch, heads, head_dim, batch, kv_heads, head_dim
        """Of q, and of k and v."""
        self.arrangements = {q_rows | kv_rows << _KEYS_UP: first}
        """By rows of q and, from bit `_KEYS_UP` on, of k."""
        self._plan = plan
        self._batch_and_heads = batch, heads, heads // kv_heads
        """Batch, heads of q, and heads of q for each of k."""
        self._least_rows, self._most_rows = plan.least_rows, plan.most_rows
        self._least_keys, self._most_keys = plan.least_keys, plan.most_keys
        self._latest: tuple[int, array[int], Tiles | None] = (0, first.words, None)
        """Rows of q, parameters and tiles. Where keys alone grow, they serve the next."""
        self._mapped_rows: tuple[int, ...] | None = None
        """Of the tensor maps of q, k and v: the word that rows are in, and what it holds beside them; then how many
        bits to move rows less 1 up by."""
        if plan.rows_place is not None:
            word, others, up = plan.rows_place
            q_map, k_map, v_map = (first.words[word + index * WORDS] & others for index in range(3))
            self._mapped_rows = word, q_map, word + WORDS, k_map, word + 2 * WORDS, v_map, up
            # The map of a single row has no row stride.
            self._least_rows, self._most_rows = _as_many(q_rows, self._least_rows, self._most_rows)
            self._least_keys, self._most_keys = _as_many(kv_rows, self._least_keys, self._most_keys)

    def arranged(
        self, lengths: int, q_rows: int, kv_rows: int, out: torch.Tensor, least_rows: int = 1
    ) -> Arrangement | None:
        """For new lengths (by which it is kept) in the plan's buckets, of so many rows at least, and an output like q;
        None for others.

        The first call of every length runs this, so it repeats what `Plan.arranged` does and writes only what lengths
        decide. What it keeps is little: the first touch of memory takes longer than the arithmetic.
        """
        if not (
            least_rows <= q_rows >= self._least_rows
            and q_rows <= self._most_rows
            and self._least_keys <= kv_rows <= self._most_keys
        ):
            return None
        plan = self._plan
        batch, heads, group = self._batch_and_heads
        latest_rows, latest_words, tiles = self._latest
        words = latest_words[:]
        if tiles is not None and q_rows == latest_rows:
            words[plan.lengths] = q_rows | kv_rows << 32
        else:
            o_batch, o_head, o_row, o_column = out.stride()
            if batch == 1:
                o_batch = 0
            if o_column != 1 or (o_batch | o_head | o_row) & VECTOR_MASK:
                return None
            q_blocks = -(-q_rows // plan.B_r)
            tiles = plan.known_tiles.get((q_blocks, heads, batch))
            if tiles is None:
                if q_blocks * heads * batch > MAX_BLOCKS:
                    return None
                tiles = plan.tiles(q_blocks, heads, batch)
            _write_output_and_sizes(
                words, plan.output_and_sizes, o_batch, o_head, o_row, heads * q_rows, q_rows,
                q_rows, kv_rows, heads, group, q_blocks, batch,
            )  # fmt: skip
        if self._mapped_rows is not None:
            q_at, q_map, k_at, k_map, v_at, v_map, up = self._mapped_rows
            mapped_keys = kv_rows - 1 << up
            words[q_at] = q_map | q_rows - 1 << up
            words[k_at] = k_map | mapped_keys
            words[v_at] = v_map | mapped_keys
        self._latest = q_rows, words, tiles
        lse_layout = ((batch, heads, q_rows), (heads * q_rows, q_rows, 1)) if plan.returns_lse else None
        # Whatever tiles were dealt, all are computed: how many keys they attend to decides only how evenly.
        known = self.arrangements
        if len(known) >= plan.kind.MOST_ARRANGEMENTS:
            known.clear()
        found = known[lengths] = Arrangement(plan, words, tiles, lse_layout)
        return found


def _differ_in_lengths_alone(layout: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """At most; but for the batch stride of a batch of one, which means nothing."""
    q_shape, q, k_shape, k, v_shape, v = layout
    other_q_shape, other_q, other_k_shape, other_k, _, other_v = other
    if (q != other_q or k != other_k or v != other_v) and (
        q_shape[0] != 1 or q[1:] != other_q[1:] or k[1:] != other_k[1:] or v[1:] != other_v[1:]
    ):
        return False
    batch, heads, _, head_dim = q_shape
    kv_batch, kv_heads, _, kv_head_dim = k_shape
    other_batch, other_heads, _, other_head_dim = other_q_shape
    return bool(
        k_shape == v_shape
        and batch == kv_batch == other_batch
        and heads == other_heads
        and kv_heads == other_k_shape[1]
        and head_dim == kv_head_dim == other_head_dim
    )


def _as_many(rows: int, least: int, most: int) -> tuple[int, int]:
    """Bounds within others: of a single row if there is one, else of several."""
    return (1, 1) if rows == 1 else (max(2, least), most)


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
