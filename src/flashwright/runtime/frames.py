"""Calls that differ in lengths alone, such as those of a growing cache: what they share, and where each is found."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from flashwright.kernels.forward.launch import MAX_BLOCKS
from flashwright.runtime.forward_words import write_output_and_sizes
from flashwright.runtime.plans import Arrangement, Plan, Tiles
from flashwright.runtime.tensor_maps import WORDS
from flashwright.runtime.tensors import VECTOR_MASK

if TYPE_CHECKING:
    import torch

KEYS_UP = 60
"""No tensor has so many rows that it takes more bits."""


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
        self.arrangements = {q_rows | kv_rows << KEYS_UP: first}
        """By rows of q and, from bit `KEYS_UP` on, of k."""
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

        The first call of every length runs this, so it repeats what `Arranger.anew` does and writes only what lengths
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
            write_output_and_sizes(
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
        if len(known) >= plan.MOST_ARRANGEMENTS:
            known.clear()
        found = known[lengths] = Arrangement(plan, words, tiles, lse_layout)
        return found


def differ_in_lengths_alone(layout: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
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
