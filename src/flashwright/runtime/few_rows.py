"""Calls of few query rows on many keys: launches of a decode kernel, in the place of the forward's arrangements.

What a step of a generation costs the host decides how fast small models generate. A plan is made once for queries of a
shape; keys that grow change one word of its parameters, and their strides if they are new.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from flashwright.hardware.units import VECTOR_BYTES
from flashwright.kernels.decode.launch import DecodeArguments
from flashwright.problem.lengths import MAX_LENGTH
from flashwright.runtime.copies_first import CopiesFirst
from flashwright.runtime.decode_plans import NOTHING_NEW, CacheTensors, DecodeArrangement, DecodeKind
from flashwright.runtime.forward_words import K_WORD, LENGTHS_WORD, O_WORD, Q_WORD, V_WORD, forward_word
from flashwright.runtime.parameters import Parameters, word_of
from flashwright.runtime.tensors import are_vector_strides, in_vectors
from flashwright.runtime.zeros import zeros_of

if TYPE_CHECKING:
    import torch

Suits = Callable[[int, int, int, int, int], bool]
"""Whether decoding is worth choosing, by batch, heads of q, heads of k, rows and keys."""


_LSE = forward_word("lse")
_PARTIAL_O, _PARTIAL_TERMS, _PROGRESS = (
    word_of(DecodeArguments, name) for name in ("partial_O", "partial_terms", "progress")
)


class FewRows:
    """Of calls that differ in shapes, strides and addresses only, those that decode kernels compute."""

    MOST_PLANS = 1024

    def __init__(self, kind: DecodeKind, suits: Suits, most_rows: int) -> None:
        """`most_rows`: whatever else they have, calls with more suit the forward."""
        self.kind = kind
        self.most_rows = most_rows
        self._suits = suits
        self._plans: dict[tuple[Any, ...], FewRowsPlan] = {}

    def arrange(
        self,
        layout: tuple[Any, ...],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        copies_first: CopiesFirst,
    ) -> FewRowsArrangement | None:
        """For tensors of a new layout; None if the forward is to compute them, or to say what is wrong with them."""
        q_shape, q_strides, k_shape, k_strides, v_shape, v_strides = layout
        batch, heads, rows, head_dim = q_shape
        kv_batch, kv_heads, keys, kv_head_dim = k_shape
        if (
            k_shape != v_shape
            or kv_batch != batch
            or kv_head_dim != head_dim
            or not batch * kv_heads * rows * keys
            or keys > MAX_LENGTH
            or heads % kv_heads
            or not self._suits(batch, heads, kv_heads, rows, keys)
        ):
            return None
        key = (q_shape, q_strides, kv_heads)
        plan = self._plans.get(key)
        if plan is None:
            if not (
                in_vectors(q) and in_vectors(out) and are_vector_strides(k_strides) and are_vector_strides(v_strides)
            ):
                return None
            if len(self._plans) >= self.MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = FewRowsPlan(self.kind, q, k, v, out)
        return plan.arranged(layout, copies_first)


class FewRowsPlan:
    """A decode kernel on a GPU with the parameters of a launch for queries of a shape; its keys' are written over."""

    def __init__(self, kind: DecodeKind, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        decoded = DecodeArrangement(kind, (q, k, v, out, *(None,) * 9), CacheTensors(), NOTHING_NEW)
        self.kind = kind
        self.torch = kind.torch
        self.device_index = kind.device_index
        self.returns_lse = kind.returns_lse
        self.scratch = decoded.scratch
        self.kernel = decoded.own.kernel
        self.launch = self.kernel.launch
        self.grid = decoded.own.grid
        self.words = decoded.own.words
        self.own = slice(0, len(self.words))
        self.partials = partials_of_streams(kind.device_index)
        self.zeros = zeros_of(q.device)
        self.spare: list[Parameters] = []
        """Those that no launch is using. A thread that finds none makes its own, and leaves them here."""
        self.latest: FewRowsArrangement | None = None
        """Whose words and strides serve the next, where keys alone grow."""

    def arranged(self, layout: tuple[Any, ...], copies_first: CopiesFirst) -> FewRowsArrangement | None:
        """For keys and values of a new length or of new strides; None for such that no kernel reads."""
        q_shape, q_strides, k_shape, k_strides, _, v_strides = layout
        latest = self.latest
        if latest is not None and latest.layout[3] == k_strides and latest.layout[5] == v_strides:
            # What is equal is kept once: the first touch of memory takes longer than the arithmetic.
            words = latest.words
            q_shape, q_strides, _, k_strides, _, v_strides = latest.layout
        elif are_vector_strides(k_strides) and are_vector_strides(v_strides):
            words = self.words[:]
            words[K_WORD + 1], words[K_WORD + 2], words[K_WORD + 3], _ = k_strides
            words[V_WORD + 1], words[V_WORD + 2], words[V_WORD + 3], _ = v_strides
        else:
            return None
        layout = (q_shape, q_strides, k_shape, k_strides, k_shape, v_strides)
        found = self.latest = FewRowsArrangement(self, layout, words, q_shape[2] | k_shape[2] << 32, copies_first)
        return found


class PartialsOfStreams:
    """Memory for partial results. Launches of one stream follow one another and share theirs; one that is captured has
    its own, which belongs to the graph."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._of_streams: dict[int, torch.Tensor] = {}

    def take(self, count: int, stream: int, device: Any) -> torch.Tensor:
        """So many bytes, for one launch on a stream; to be kept until it is queued."""
        torch = self._torch
        if torch.cuda.is_current_stream_capturing():
            return torch.empty(count, dtype=torch.uint8, device=device)
        known = self._of_streams.get(stream)
        if known is None or len(known) < count:
            known = self._of_streams[stream] = torch.empty(count, dtype=torch.uint8, device=device)
        return known


@cache
def partials_of_streams(device_index: int) -> PartialsOfStreams:
    return PartialsOfStreams()


class FewRowsArrangement:
    """A plan's parameters for keys and values of certain lengths and strides, addresses apart."""

    __slots__ = ("copies_first", "layout", "lengths", "plan", "words")

    def __init__(
        self, plan: FewRowsPlan, layout: tuple[Any, ...], words: array[int], lengths: int, copies_first: CopiesFirst
    ) -> None:
        """`words`, but for the one of `lengths`, serve other lengths, too."""
        self.plan = plan
        self.layout = layout
        self.words = words
        self.lengths = lengths
        self.copies_first = copies_first

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        starts: Any = None,
        packed: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queues the launch on the current stream; returns the output and, if it is computed, the log-sum-exp."""
        plan = self.plan
        torch = plan.torch
        q_address, k_address, v_address, o_address = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        if (q_address | k_address | v_address | o_address) % VECTOR_BYTES:
            return self.copies_first.run(q, k, v, out, starts, packed)
        index = plan.device_index
        stream = torch._C._cuda_getCurrentRawStream(index)
        device = q.device
        scratch = plan.scratch
        partials = plan.partials.take(scratch.partial_bytes, stream, device)
        partials_address = partials.data_ptr()
        try:
            parameters = plan.spare.pop()
        except IndexError:
            parameters = Parameters(plan.words[:], (0,))
        words = parameters.words
        words[plan.own] = self.words
        words[LENGTHS_WORD] = self.lengths
        words[Q_WORD] = q_address
        words[K_WORD] = k_address
        words[V_WORD] = v_address
        words[O_WORD] = o_address
        words[_PARTIAL_O] = partials_address
        words[_PARTIAL_TERMS] = partials_address + scratch.partial_terms
        words[_PROGRESS] = plan.zeros.take(scratch.zeros, stream).data_ptr()
        lse = None
        if plan.returns_lse:
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
            words[_LSE] = lse.data_ptr()
        if index == torch._C._cuda_getDevice():
            plan.launch(plan.grid, parameters.address, stream)
        else:
            with torch.cuda.device(index):
                plan.launch(plan.grid, parameters.address, stream)
        plan.spare.append(parameters)
        return out, lse
