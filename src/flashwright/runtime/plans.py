"""A kernel on a GPU, and its packed parameters for tensors of certain shapes and strides."""

from __future__ import annotations

from array import array
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from flashwright.hardware.units import VECTOR_BYTES
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.launch import ForwardLaunch
from flashwright.kernels.launch import Grid, Sizes
from flashwright.kernels.registry import family_of
from flashwright.problem.window import Window
from flashwright.runtime.copies_first import CopiesFirst, Results
from flashwright.runtime.devices import multiprocessors
from flashwright.runtime.forward_words import LENGTHS_WORD, O_WORD, forward_word
from flashwright.runtime.loaded import LoadedKernel, loaded_kernel
from flashwright.runtime.parameters import WORD_BYTES, Parameters, kind_of_map, words_of
from flashwright.runtime.tensor_maps import WORDS, common_rows_place, map_template
from flashwright.runtime.tensors import Allocate, Packed

if TYPE_CHECKING:
    import torch

Schedule: TypeAlias = "array[int] | tuple[int, int]"
"""Words of a schedule: all of them, or the first two, where a rule of the kernel's own serves."""
LseLayout: TypeAlias = tuple[tuple[int, int, int], tuple[int, int, int]]
"""Shape and strides of log-sum-exps."""
Tiles: TypeAlias = "tuple[Grid, Schedule | None, int]"
"""A grid; a schedule, if the kernel takes one; and `runs` to begin with (see `Arrangement`)."""
BALANCED = 2
"""Runs after which a schedule is not improved any more."""


class Plan:
    """A kernel on a GPU with the parameters of one launch, from which those of others are made."""

    MOST_ARRANGEMENTS = 4096
    """That are kept in one place; then all are forgotten."""

    def __init__(
        self,
        config: KernelConfig,
        launch: ForwardLaunch,
        *,
        torch: ModuleType,
        device_index: int,
        window: Window,
        returns_lse: bool,
        rows: tuple[int, int],
        keys: tuple[int, int],
        allocate: Allocate,
        copies_first: CopiesFirst,
    ) -> None:
        """`rows`, `keys`: the least and the most that the config was chosen for."""
        self.torch = torch
        self.device_index = device_index
        self.window = window
        self.returns_lse = returns_lse
        self.copies_first = copies_first
        self.config = config
        self.B_r = config.B_r
        self.variant = launch.variant
        self.kernel: LoadedKernel = loaded_kernel(config, launch.variant, device_index)
        self.launch = self.kernel.launch
        self.rules = family_of(config).launch_rules
        self.row_stride = self.rules.row_stride(config)
        self.allocate = allocate
        self.least_rows, self.most_rows = rows
        self.least_keys, self.most_keys = keys
        self.multiprocessors = multiprocessors(device_index)
        self.maps = [map_template(kind_of_map(each)) for each in launch.tensor_maps]
        # The parameters one after the other in 8-byte words: tensor maps, arguments, perhaps a schedule.
        self.words = array("Q", [word for template in self.maps for word in template.blank])
        self.arguments = len(self.maps) * WORDS
        self.output_and_sizes = (self.arguments + O_WORD + 1) * WORD_BYTES
        self.lengths = self.arguments + LENGTHS_WORD
        self.rows_place = common_rows_place(self.maps)
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
            self.arguments + forward_word(name) for name in ("Q", "K", "V", "O", "lse", "q_starts", "kv_starts")
        )
        if self.maps:  # the kernel finds its inputs by their tensor maps instead
            self.q, self.k, self.v = (index * WORDS + template.address_word for index, template in enumerate(self.maps))

    def serves(self, q_rows: int, kv_rows: int) -> bool:
        """Whether these are lengths that its config was chosen for."""
        return self.least_rows <= q_rows <= self.most_rows and self.least_keys <= kv_rows <= self.most_keys

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
            if len(self.known_tiles) >= self.MOST_ARRANGEMENTS:
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
        return words_of(self.rules.schedule(self.config, self.variant, sizes, self.window, grid[0]))


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
    ) -> Results:
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
            return plan.copies_first.run(q, k, v, out, starts, packed, lse)
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
