"""How a plan's parameters for tensors of a new layout are made: by a frame, over the latest ones, or anew."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashwright.kernels.forward.launch import MAX_BLOCKS, check_row_stride, check_tiles, map_strides
from flashwright.kernels.launch import Sizes
from flashwright.runtime.forward_words import (
    BLOCKS_WORD,
    HEADS_WORD,
    K_WORD,
    LENGTHS_WORD,
    LSE_BATCH_STRIDE_WORD,
    LSE_HEAD_STRIDE_WORD,
    O_WORD,
    Q_WORD,
    V_WORD,
    write_output_and_sizes,
)
from flashwright.runtime.frames import KEYS_UP, Frame, differ_in_lengths_alone
from flashwright.runtime.plans import Arrangement, Plan
from flashwright.runtime.tensor_maps import WORDS
from flashwright.runtime.tensors import Packed, are_vector_strides

if TYPE_CHECKING:
    import torch


class Arranger:
    """Makes a plan's arrangements, and remembers those that serve others."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.latest: tuple[tuple[Any, ...], Arrangement] | None = None
        """Of calls that neither have packed sequences nor give an output, the latest that no frame served."""
        self.frame: Frame | None = None
        """Of the latest strides that came with a second length."""

    def anew(
        self,
        layout: tuple[Any, ...],
        out_strides: Sequence[int],
        packed: Packed | None,
        lse_strides: tuple[int, int] | None = None,
    ) -> Arrangement:
        """The parameters for tensors that the kernel can read; raises `ValueError` for more than a launch can have."""
        plan = self.plan
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
                check_row_stride(plan.row_stride, name, rows, strides[2])
        check_tiles(plan.config, sizes)
        q_blocks = sizes.q_blocks(plan.config)
        words = plan.words[:]
        first = plan.arguments
        for tensor, strides in ((Q_WORD, q_strides), (K_WORD, k_strides), (V_WORD, v_strides), (O_WORD, out_strides)):
            words[first + tensor + 1 : first + tensor + 4] = array("Q", strides[:3])
            if batch == 1:  # whose stride means nothing; packed sequences are found by their first rows
                words[first + tensor + 1] = 0
        lse_batch_stride, lse_head_stride = lse_strides or (q_heads * q_rows, q_rows)
        words[first + LSE_BATCH_STRIDE_WORD] = lse_batch_stride if packed is None else 0
        words[first + LSE_HEAD_STRIDE_WORD] = lse_head_stride
        words[first + LENGTHS_WORD] = q_rows | kv_rows << 32
        words[first + HEADS_WORD] = q_heads | q_heads // kv_heads << 32
        words[first + BLOCKS_WORD] = q_blocks | batches << 32
        for index, (template, shape, strides) in enumerate(
            zip(plan.maps, (q_shape, k_shape, k_shape), (q_strides, k_strides, v_strides), strict=False)
        ):
            template.write(words, index * WORDS, shape[::-1], map_strides(shape, strides))
        lse_layout = ((batch, q_heads, q_rows), (q_heads * q_rows, q_rows, 1)) if plan.returns_lse else None
        return Arrangement(plan, words, plan.tiles(q_blocks, q_heads, sizes.lines), lse_layout)

    def like_others(self, layout: tuple[Any, ...], out: torch.Tensor) -> Arrangement | None:
        """The same for a call that neither has packed sequences nor gives an output, by the parameters of another; None
        unless they differ in lengths within the plan's buckets, strides and batch at most."""
        plan = self.plan
        if self.latest is None or plan.row_stride or (plan.maps and plan.rows_place is None):
            return None
        q_rows, kv_rows = layout[0][2], layout[2][2]
        lengths = q_rows | kv_rows << KEYS_UP
        frame, (latest_layout, latest) = self.frame, self.latest
        if frame is not None and differ_in_lengths_alone(layout, frame.layout):
            found = frame.arrangements.get(lengths) or frame.arranged(lengths, q_rows, kv_rows, out)
            if found is not None:
                return found
        # The stride of a single row means nothing, which may be that of several in a frame.
        if differ_in_lengths_alone(layout, latest_layout) and all(map(are_vector_strides, layout[1::2])):
            frame = Frame(plan, latest_layout, latest)
            found = frame.arranged(lengths, q_rows, kv_rows, out)
            if found is not None:
                self.frame = frame
                return found
        found = self._over(latest_layout, latest, layout, out)
        if found is not None:
            self.latest = layout, found
        return found

    def _over(
        self, latest_layout: tuple[Any, ...], latest: Arrangement, layout: tuple[Any, ...], out: torch.Tensor
    ) -> Arrangement | None:
        """All that lengths, strides and the batch decide written over the latest's parameters. Contiguous tensors come
        here with every new length."""
        plan = self.plan
        (_, latest_heads, _, latest_head_dim), _, (_, latest_kv_heads, _, _), _, _, _ = latest_layout
        q_shape, q_strides, k_shape, k_strides, v_shape, v_strides = layout
        batch, heads, q_rows, head_dim = q_shape
        kv_batch, kv_heads, kv_rows, kv_head_dim = k_shape
        out_strides = out.stride()
        q_blocks = -(-q_rows // plan.B_r)
        if (
            k_shape != v_shape
            or not head_dim == kv_head_dim == latest_head_dim
            or heads != latest_heads
            or kv_heads != latest_kv_heads
            or not batch == kv_batch != 0
            or not plan.serves(q_rows, kv_rows)
            or q_blocks * heads * batch > MAX_BLOCKS
            or not (are_vector_strides(q_strides) and are_vector_strides(k_strides) and are_vector_strides(v_strides))
            or not are_vector_strides(out_strides)
        ):
            return None
        words, first = latest.words[:], plan.arguments
        q_batch, words[first + Q_WORD + 2], words[first + Q_WORD + 3], _ = q_strides
        k_batch, words[first + K_WORD + 2], words[first + K_WORD + 3], _ = k_strides
        v_batch, words[first + V_WORD + 2], words[first + V_WORD + 3], _ = v_strides
        o_batch, o_head, o_row, _ = out_strides
        if batch == 1:
            q_batch = k_batch = v_batch = o_batch = 0
        words[first + Q_WORD + 1], words[first + K_WORD + 1], words[first + V_WORD + 1] = q_batch, k_batch, v_batch
        write_output_and_sizes(
            words, plan.output_and_sizes, o_batch, o_head, o_row, heads * q_rows, q_rows,
            q_rows, kv_rows, heads, heads // kv_heads, q_blocks, batch,
        )  # fmt: skip
        if plan.maps:
            Q, K, V = plan.maps
            Q.write(words, 0, q_shape[::-1], map_strides(q_shape, q_strides))
            K.write(words, WORDS, k_shape[::-1], map_strides(k_shape, k_strides))
            if V is K and v_strides == k_strides:
                words[2 * WORDS : 3 * WORDS] = words[WORDS : 2 * WORDS]
            else:
                V.write(words, 2 * WORDS, k_shape[::-1], map_strides(k_shape, v_strides))
        lse_layout = ((batch, heads, q_rows), (heads * q_rows, q_rows, 1)) if plan.returns_lse else None
        return Arrangement(plan, words, plan.tiles(q_blocks, heads, batch), lse_layout)
