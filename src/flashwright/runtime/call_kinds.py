"""What a call decides once and repeats, kept apart from what changes from call to call.

A `CallKind` is what a caller requests, shapes and strides apart. Within it, a `Plan` is a kernel on a GPU, and an
`Arrangement` its packed parameters for tensors of certain shapes and strides. A call like one before copies the
parameters and fills in addresses. A call of new lengths finds a `Frame`, what tensors that differ in lengths alone
share, and writes what lengths decide; one of new strides writes over the parameters of another. Neither compiles or
calls the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashwright.kernels.family import KernelConfig
from flashwright.kernels.forward.launch import ForwardLaunch, PackedSequences
from flashwright.kernels.registry import family_of
from flashwright.kernels.tensors import check_layout
from flashwright.problem.lengths import MAX_LENGTH, bucket_bounds, length_bucket
from flashwright.problem.options import AttentionOptions
from flashwright.problem.shapes import check_shapes, is_empty
from flashwright.runtime.arranging import Arranger
from flashwright.runtime.copies_first import CopiesFirst, Results
from flashwright.runtime.devices import multiprocessors
from flashwright.runtime.few_rows import FewRows, FewRowsArrangement
from flashwright.runtime.frames import KEYS_UP, Frame
from flashwright.runtime.plans import Arrangement, Plan
from flashwright.runtime.tensors import Packed, allocator, device_tensor, in_vectors, placed_anywhere

if TYPE_CHECKING:
    import torch

Choose = Callable[[int, int, int], KernelConfig]
"""The config for a head dimension and the lengths of queries and keys; the same within a bucket of lengths."""


class CallKind:
    """Calls that differ in the shapes, strides and addresses of their tensors only."""

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
        self._copies_first = CopiesFirst(self.run)
        self._arrangers: dict[tuple[Any, ...], Arranger] = {}
        # Of calls that neither have packed sequences nor give an output.
        self._frame: Frame | None = None
        self._latest: Arranger | None = None
        self._latest_of_buckets: dict[tuple[str, str], Arranger] = {}
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
    ) -> Results:
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
                lengths = q_rows | kv_rows << KEYS_UP
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
        if len(self.arrangements) >= Plan.MOST_ARRANGEMENTS:
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
            latest = self._latest
            if latest is None or not latest.plan.serves(q_shape[2], k_shape[2]):
                latest = self._latest_of_buckets.get((length_bucket(q_shape[2]), length_bucket(k_shape[2])))
            found = None if latest is None else latest.like_others(layout, out)
            if latest is not None and found is not None:
                self._latest, self._frame = latest, latest.frame or self._frame
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
            arranger = self._arranger(q, k, v, out, packed, lse_strides)
            found = arranger.anew(layout, out.stride(), packed, lse_strides)
            if is_plain:
                arranger.latest = layout, found
                buckets = length_bucket(q_shape[2]), length_bucket(k_shape[2])
                self._latest = self._latest_of_buckets[buckets] = arranger
        else:
            found = self._copies_first
        self.arrangements[layout] = found
        return found

    def _arranger(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        packed: Packed | None,
        lse_strides: tuple[int, int] | None,
    ) -> Arranger:
        head_dim, q_length, kv_length = q.shape[3], q.shape[2], k.shape[2]
        if packed is not None:
            _, q_length, kv_length = packed
        key = (
            q.dtype, head_dim, q.shape[1] == k.shape[1], packed is None, length_bucket(q_length),
            length_bucket(kv_length), lse_strides is None,
        )  # fmt: skip
        found = self._arrangers.get(key)
        if found is None:
            config = self._choose(head_dim, q_length, kv_length)
            plan = Plan(
                config,
                self._launch(config, q, k, v, out, packed, lse_strides),
                torch=self.torch,
                device_index=self.device_index,
                window=self.options.window,
                returns_lse=self.returns_lse,
                rows=bucket_bounds(q_length),
                keys=bucket_bounds(kv_length),
                allocate=allocator(q.device.type),
                copies_first=self._copies_first,
            )
            found = self._arrangers[key] = Arranger(plan)
        return found

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
