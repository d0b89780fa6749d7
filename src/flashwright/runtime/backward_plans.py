"""Launch plans of the backward: gradients of q, k and v by the kernels of a config, two or three.

As with the forward, a kind of call decides once and repeats. An arrangement is the packed parameters of tensors of
certain shapes and strides; a call like one before copies them and fills in addresses. All kernels take the same
arguments, so that one copy serves them; the memory they work in is PyTorch's, of the current stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flashwright.hardware.units import VECTOR_BYTES
from flashwright.kernels.backward.launch import DQ, ROWS, BackwardArguments, BackwardLaunch, Scratch, scratch_for
from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.launch import PackedSequences
from flashwright.kernels.registry import family_of
from flashwright.problem.lengths import length_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import check_shapes
from flashwright.runtime.devices import multiprocessors
from flashwright.runtime.forward_words import forward_word
from flashwright.runtime.loaded import loaded_kernel
from flashwright.runtime.parameters import SOME_ADDRESS, WORD_BYTES, Parameters, kind_of_map, word_of, words_of
from flashwright.runtime.tensor_maps import WORDS, map_template
from flashwright.runtime.tensors import (
    Packed,
    allocator,
    allocator_like,
    device_tensor,
    empty_output,
    in_vectors,
    with_vector_rows,
)

if TYPE_CHECKING:
    import torch

Choose = Callable[[int, int, int], KernelConfig]
"""The config for a head dimension and the lengths of queries and keys; the same within a bucket of lengths."""
Inputs = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""q, k, v, the output and its gradient."""
Gradients = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]
"""Of q, k and v."""
Starts = tuple["torch.Tensor", "torch.Tensor"]


TENSORS = ("q", "k", "v", "out", "do", "dq", "dk", "dv")
"""In the order of a launch."""
_word = partial(word_of, BackwardArguments)
_VIEWS = tuple(map(forward_word, "QKVO")) + tuple(map(_word, ("dO", "dQ", "dK", "dV")))
"""The words of their addresses."""
_LSE, _Q_STARTS, _KV_STARTS = map(forward_word, ("lse", "q_starts", "kv_starts"))
_DLSE = _word("dlse")
_SCRATCH_WORDS = tuple(map(_word, Scratch.PLACES))


class BackwardKind:
    """Calls that differ in the shapes, strides and addresses of their tensors only."""

    MOST_ARRANGEMENTS = 4096

    def __init__(
        self, options: AttentionOptions, choose: Choose, *, device_index: int, accumulates: bool = False
    ) -> None:
        """`accumulates`: gradients are added to fp32 sums, which are given, seen as twice as many columns of q's
        dtype."""
        import torch

        self.torch = torch
        self.options = options
        self.accumulates = accumulates
        self.device_index = device_index
        self.arrangements: dict[tuple[Any, ...], BackwardArrangement | BackwardCopiesFirst] = {}
        self._choose = choose
        self._configs: dict[tuple[Any, ...], KernelConfig] = {}
        self._plans: dict[tuple[Any, ...], BackwardPlan] = {}

    def run(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None = None,
        starts: Starts | None = None,
        packed: Packed | None = None,
        gradients: Gradients | None = None,
    ) -> Gradients:
        """Queues the launches for tensors that are not empty; returns the gradients of q, k and v, laid out as they are
        unless room for them is given. The log-sum-exp, its gradient and the starts are contiguous."""
        layout: tuple[Any, ...] = (
            q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), out.shape, out.stride(), do.shape,
            do.stride(), packed,
        )  # fmt: skip
        if gradients is not None:
            layout = (*layout, *(x.stride() for x in gradients))
        inputs = (q, k, v, out, do)
        arrangement = self.arrangements.get(layout) or self._arrange(layout, inputs, gradients, packed)
        return arrangement.run(inputs, gradients, lse, dlse, starts, packed)

    def _arrange(
        self, layout: tuple[Any, ...], inputs: Inputs, gradients: Gradients | None, packed: Packed | None
    ) -> BackwardArrangement | BackwardCopiesFirst:
        """For tensors of a new layout, everything checked. Raises `ValueError` for what is not attention's."""
        if len(self.arrangements) >= self.MOST_ARRANGEMENTS:
            self.arrangements.clear()
        check_shapes(*(x.shape for x in inputs[:3]))
        tensors = (*inputs, *(gradients or self.gradients_like(inputs)))
        found: BackwardArrangement | BackwardCopiesFirst
        if all(in_vectors(x) for x in tensors):
            found = self._arranged(tensors, packed)
        else:
            found = BackwardCopiesFirst(self)
        self.arrangements[layout] = found
        return found

    def gradients_like(self, inputs: Inputs) -> Gradients:
        """Room for the gradients of q, k and v, laid out as they are."""
        q, k, v, _, _ = inputs
        return self.torch.empty_like(q), self.torch.empty_like(k), self.torch.empty_like(v)

    def _arranged(self, tensors: Sequence[torch.Tensor], packed: Packed | None) -> BackwardArrangement:
        config = self._config(tensors[0], tensors[1], packed)
        # A tensor map is known to be of the tensor whose address it has.
        views = [
            replace(device_tensor(name, x), address=SOME_ADDRESS * (1 + index))
            for index, (name, x) in enumerate(zip(TENSORS, tensors, strict=True))
        ]
        sequences = None if packed is None else PackedSequences(packed[0], 0, 0, packed[1], packed[2])
        launch: BackwardLaunch = family_of(config).launch(
            config,
            *views,
            lse_address=SOME_ADDRESS,
            scratch_address=0,
            options=self.options,
            packed=sequences,
            accumulates=self.accumulates,
            multiprocessors=multiprocessors(self.device_index),
        )
        key = (config, launch.variant)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = BackwardPlan(self, config, launch)
        return BackwardArrangement(plan, launch, scratch_for(config, views[0], views[1], sequences), tensors)

    def _config(self, q: torch.Tensor, k: torch.Tensor, packed: Packed | None) -> KernelConfig:
        head_dim, q_length, kv_length = q.shape[3], q.shape[2], k.shape[2]
        if packed is not None:
            _, q_length, kv_length = packed
        key = (head_dim, length_bucket(q_length), length_bucket(kv_length))
        config = self._configs.get(key)
        if config is None:
            config = self._configs[key] = self._choose(head_dim, q_length, kv_length)
        return config


class BackwardPlan:
    """The kernels of a config on a GPU."""

    def __init__(self, kind: BackwardKind, config: KernelConfig, launch: BackwardLaunch) -> None:
        self.kind = kind
        self.torch = kind.torch
        self.device_index = index = kind.device_index
        self.config = config
        self.variant = launch.variant
        self.rows = loaded_kernel(config, launch.variant, index, ROWS)
        self.own = loaded_kernel(config, launch.variant, index)
        self.dq = None if launch.finishes_dq else loaded_kernel(config, launch.variant, index, DQ)
        self.arguments = first = len(launch.tensor_maps) * WORDS
        self.arguments_address = len(launch.tensor_maps) * WORD_BYTES
        """Where the last of the addresses of parameters lies, from the first on."""
        self.all_words = slice(0, first + len(words_of(launch.arguments)))
        self.lse, self.dlse = first + _LSE, first + _DLSE
        self.q_starts, self.kv_starts = first + _Q_STARTS, first + _KV_STARTS
        self.spare: list[Parameters] = []
        """Those that no launch is using. A thread that finds none makes its own, and leaves them here."""


class BackwardArrangement:
    """A plan's parameters for tensors of certain shapes and strides, addresses apart."""

    __slots__ = ("address_places", "allocators", "grid", "plan", "rows_grid", "scratch_places", "words")

    def __init__(
        self, plan: BackwardPlan, launch: BackwardLaunch, scratch: Scratch, tensors: Sequence[torch.Tensor]
    ) -> None:
        self.plan = plan
        self.grid, self.rows_grid = launch.grid, launch.rows_grid
        _, _, _, _, _, dq, dk, dv = tensors
        working_memory = partial(allocator(dq.device.type), (scratch.total,), (1,), plan.torch.uint8)
        self.allocators = (allocator_like(dq), allocator_like(dk), allocator_like(dv), working_memory)
        self.scratch_places = tuple(
            (plan.arguments + word, getattr(scratch, name))
            for word, name in zip(_SCRATCH_WORDS, Scratch.PLACES, strict=True)
        )
        self.words = array("Q")
        map_places = []
        for tensor_map in launch.tensor_maps:
            first, template = len(self.words), map_template(kind_of_map(tensor_map))
            self.words.extend(template.blank)
            template.write(self.words, first, tensor_map.shape, tensor_map.strides)
            map_places.append((first + template.address_word, tensor_map.address // SOME_ADDRESS - 1))
        self.address_places = (*((plan.arguments + word, tensor) for tensor, word in enumerate(_VIEWS)), *map_places)
        """The words of addresses, and whose of `TENSORS` they are."""
        self.words.extend(words_of(launch.arguments))

    def run(
        self,
        inputs: Inputs,
        gradients: Gradients | None,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        starts: Starts | None,
        packed: Packed | None,
    ) -> Gradients:
        """Queues the launches on the current stream; returns the gradients, in room that is given or allocated."""
        plan = self.plan
        torch = plan.torch
        index = plan.device_index
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self.run(inputs, gradients, lse, dlse, starts, packed)
        new_dq, new_dk, new_dv, working_memory = self.allocators
        if gradients is None:
            gradients = new_dq(), new_dk(), new_dv()
        addresses = [x.data_ptr() for x in (*inputs, *gradients)]
        q, k, v, out, do, dq, dk, dv = addresses
        if (q | k | v | out | do | dq | dk | dv) % VECTOR_BYTES:
            return BackwardCopiesFirst(plan.kind).run(inputs, gradients, lse, dlse, starts, packed)
        scratch = working_memory()
        try:
            parameters = plan.spare.pop()
        except IndexError:
            parameters = Parameters(self.words[:], range(0, plan.arguments + 1, WORDS))
        words = parameters.words
        words[plan.all_words] = self.words
        for word, tensor in self.address_places:
            words[word] = addresses[tensor]
        base = scratch.data_ptr()
        for word, offset in self.scratch_places:
            words[word] = base + offset
        words[plan.lse] = lse.data_ptr()
        if dlse is not None:
            words[plan.dlse] = dlse.data_ptr()
        if starts is not None:
            words[plan.q_starts], words[plan.kv_starts] = starts[0].data_ptr(), starts[1].data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(index)
        all_parameters = parameters.address
        arguments = all_parameters + plan.arguments_address
        plan.rows.launch(self.rows_grid, arguments, stream)
        plan.own.launch(self.grid, all_parameters, stream)
        if plan.dq is not None:
            plan.dq.launch(self.rows_grid, arguments, stream)
        plan.spare.append(parameters)
        return gradients


class BackwardCopiesFirst:
    """In the place of an arrangement for tensors whose rows the kernels cannot move in 16-byte vectors."""

    def __init__(self, kind: BackwardKind) -> None:
        self._kind = kind

    def run(
        self,
        inputs: Inputs,
        gradients: Gradients | None,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        starts: Starts | None,
        packed: Packed | None,
    ) -> Gradients:
        """Copies what must be copied. Room for gradients that is laid out as q, k and v is replaced if need be."""
        dq, dk, dv = (
            gradient if in_vectors(gradient) else empty_output(x)
            for gradient, x in zip(gradients or self._kind.gradients_like(inputs), inputs[:3], strict=True)
        )
        q, k, v, out, do = (with_vector_rows(x) for x in inputs)
        return self._kind.run(do, q, k, v, out, lse, dlse, starts, packed, (dq, dk, dv))
