"""What a model carries in the place of a mask of (batch, 1, rows, keys), where kernels need less to know.

Models hand the tensor that one function makes to all that attend. In padded batches, and in caches with room for more,
the keys of each sequence are a range: the tensor is (batch, 1, 1, 3) int32. Of packed sequences it is where each
begins: (1, 1, sequences + 1, 1) int32. Both have four dimensions, because models pass masks of four on as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from flashwright.attention import attention
from flashwright.choice.few_rows import MOST_PACKED_ROWS
from flashwright.integrations.flash_attn import flash_attn_varlen_func
from flashwright.operators.columns import kernel_columns, with_columns
from flashwright.problem.options import AttentionOptions
from flashwright.problem.window import Window

if TYPE_CHECKING:
    import torch


class KeyRanges(NamedTuple):
    """Of each sequence, int32 on the device."""

    begins: torch.Tensor
    ends: torch.Tensor
    first_rows: torch.Tensor
    """Where the first row stands among the keys."""
    end_together: bool
    """The last row stands at the last key of its sequence, in all of them."""
    common_end: int | None = None
    """Of keys that begin at 0, where the host knows it and it is the same in all."""
    begin_together: bool = False
    """All begin at 0, as far as the host knows."""

    def as_mask(self) -> torch.Tensor:
        import torch

        columns = torch.stack((self.begins, self.ends, self.first_rows)).to(torch.int32)  # each without gaps
        if not self.end_together:  # one column more says so
            columns = torch.nn.functional.pad(columns, (0, 0, 0, 1))
        mask = columns.T[:, None, None]
        common_end = self.common_end if self.end_together else None
        if common_end is not None:
            mask.common_end = common_end
        if not is_traced():  # all layers of a model have the same tensor, and need not take it apart
            mask.ranges = KeyRanges(columns[0], columns[1], columns[2], self.end_together, common_end)
        return mask

    @classmethod
    def of_mask(cls, mask: torch.Tensor | None) -> KeyRanges | None:
        """What a model carried here; None if it is a mask."""
        import torch

        if mask is None or mask.dtype != torch.int32 or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
            return None
        ranges: KeyRanges | None = getattr(mask, "ranges", None)
        if ranges is not None:
            return ranges
        begins, ends, first_rows = (mask[:, 0, 0, column] for column in range(3))
        return cls(begins, ends, first_rows, mask.shape[3] == 3, getattr(mask, "common_end", None))

    def visible(self, window: Window, rows: int, keys: int) -> torch.Tensor:
        """(batch, 1, rows, keys): which keys each row attends to, as PyTorch's functions take it."""
        import torch

        device = self.begins.device
        begins, ends, first = (x[:, None, None, None] for x in self[:3])
        key, row = torch.arange(keys, device=device), torch.arange(rows, device=device)[:, None] + first
        visible = (key >= begins) & (key < ends)
        if window.left is not None:
            visible = visible & (key >= row - window.left)
        if window.right is not None:
            visible = visible & (key <= row + window.right)
        return visible.expand(len(self.begins), 1, rows, keys)


class PackedRows(NamedTuple):
    """Sequences one after the other, over the rows of all of a batch."""

    starts: torch.Tensor
    """Of each sequence, and the end of the last: int32 on the device."""
    longest: int
    """How many rows the longest has, at most."""

    def as_mask(self) -> torch.Tensor:
        mask = self.starts[None, None, :, None]
        mask.longest = self.longest
        return mask

    @classmethod
    def of_mask(cls, mask: torch.Tensor | None, rows: int) -> PackedRows | None:
        """What a model carried here, of so many rows in all; None if it is something else."""
        import torch

        if mask is None or mask.dtype != torch.int32 or mask.dim() != 4 or mask.shape[2] < 2 or mask.shape[3] != 1:
            return None
        return cls(mask[0, 0, :, 0], getattr(mask, "longest", rows))

    def visible(self, window: Window, rows: int, keys: int) -> torch.Tensor:
        """(batch, 1, rows, keys): which keys each row attends to, as PyTorch's functions take it."""
        import torch

        places = torch.arange(int(self.starts[-1]), device=self.starts.device, dtype=torch.int32)
        sequence = torch.searchsorted(self.starts, places, right=True).view(-1, rows)
        place = torch.arange(rows, device=self.starts.device)
        visible = sequence[:, :, None] == sequence[:, None, :]
        if window.left is not None:
            visible &= place >= place[:, None] - window.left
        if window.right is not None:
            visible &= place <= place[:, None] + window.right
        return visible[:, None]


def rows_of_sequences(sequences: torch.Tensor) -> PackedRows | None:
    """Of (batch, rows) numbers of sequences; None while a graph is traced or captured, which cannot depend on them."""
    import torch

    if is_traced():
        return None
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    places = begins.flatten().nonzero()[:, 0]
    starts = torch.nn.functional.pad(places, (0, 1), value=sequences.numel()).to(torch.int32)
    return PackedRows(starts, int(starts.diff().max()))


def ranges_of_padding(
    padding: torch.Tensor | None, batch: int, q_length: int, kv_length: int, first_row: Any, device: Any
) -> KeyRanges | None:
    """The ranges of keys that a (batch, kv_length) mask of bool leaves; None if it leaves others, or if that cannot be
    known while a graph is traced or captured. Without a mask, all keys up to the last row's.

    `first_row` is the position of the first row among the keys: an integer, or a tensor of one.
    """
    import torch

    def everywhere(value: Any) -> torch.Tensor:
        of_one = torch.as_tensor(value, dtype=torch.int32, device=device).reshape(1)
        return of_one.expand(batch)

    if padding is None:
        end = first_row + q_length
        known = end if isinstance(end, int) else None
        if known is None and q_length > MOST_PACKED_ROWS and not is_traced():
            known = int(end)  # so that the many rows are the forward's
        return KeyRanges(everywhere(0), everywhere(end), everywhere(first_row), True, known, True)
    if is_traced():
        return None
    keys = torch.arange(kv_length, device=device)
    begins = torch.where(padding, keys, kv_length).amin(-1)
    ends = torch.where(padding, keys + 1, 0).amax(-1)
    begins = torch.minimum(begins, ends)
    facts = (ends - begins == padding.sum(-1), ends == first_row + q_length, begins == 0, ends == kv_length)
    contiguous, end_together, begin_together, whole = torch.stack([fact.all() for fact in facts]).tolist()
    if not contiguous:
        return None
    known = kv_length if begin_together and whole else None
    return KeyRanges(begins, ends, everywhere(first_row), end_together, known, begin_together)


def is_traced() -> bool:
    import torch

    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def attention_of_packed_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedRows,
    window: Window,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """(batch, heads, rows, head_dim) in and out."""
    batch, _, rows, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out: torch.Tensor = flash_attn_varlen_func(
        q, k, v, packed.starts, packed.starts, packed.longest, packed.longest, softmax_scale=scale,
        window_size=sides(window), softcap=softcap,
    )  # fmt: skip
    return out.unflatten(0, (batch, rows)).transpose(1, 2)


def attention_in_ranges(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: KeyRanges,
    window: Window,
    scale: float | None,
    softcap: float,
) -> torch.Tensor | None:
    """(batch, heads, rows, head_dim) in and out, rows without keys 0; None if a graph is traced that cannot have it.

    Few rows are decoded; of others, what is no padding is packed.
    """
    import torch

    options = AttentionOptions.of(False, (window.left, window.right), scale, softcap)
    if ranges.common_end is not None:
        key, value = (x[:, :, : ranges.common_end] for x in (key, value))
        limits = (window.left, window.right)
        out: torch.Tensor = attention(query, key, value, window=limits, scale=scale, softcap=softcap)
        return out
    is_aligned = ranges.end_together or (window.left is None and window.right is None)
    needs_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    few = query.shape[2] * query.shape[1] <= MOST_PACKED_ROWS * key.shape[1]
    if is_aligned and few and not needs_gradients:
        from flashwright.operators.torch_ops import decode_ranges

        columns = kernel_columns(query.shape[-1], value.shape[-1])
        q, k, v = (with_columns(x, columns) for x in (query, key, value))
        return decode_ranges(q, k, v, ranges.begins, ranges.ends, options)[..., : value.shape[-1]]
    return None if is_traced() else _packed(query, key, value, ranges, window, scale, softcap)


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranges: KeyRanges,
    window: Window,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    import torch

    rows, keys = query.shape[2], key.shape[2]
    begins, ends, first_rows = (x[:, None] for x in ranges[:3])
    key_places = torch.arange(keys, device=key.device)
    has_key = (key_places >= begins) & (key_places < ends)
    row_places = torch.arange(rows, device=key.device) + first_rows
    if window.left is None and window.right is None:
        has_row = torch.ones_like(row_places, dtype=torch.bool)
    else:  # rows of padding stand at no key, and what is aligned to the last key are the others
        has_row = (row_places >= begins) & (row_places < ends)
    (q_starts, longest_q), (k_starts, longest_k) = (_starts(x) for x in (has_row, has_key))
    q, k, v = (x.transpose(1, 2)[has] for x, has in ((query, has_row), (key, has_key), (value, has_key)))
    result = flash_attn_varlen_func(
        q, k, v, q_starts, k_starts, longest_q, longest_k, softmax_scale=scale, window_size=sides(window),
        softcap=softcap,
    )  # fmt: skip
    out = result.new_zeros((query.shape[0], rows, *result.shape[1:]))
    out[has_row] = result
    return out.transpose(1, 2)


def sides(window: Window) -> tuple[int, int]:
    """As `flash_attn` writes it."""
    left, right = (-1 if side is None else side for side in (window.left, window.right))
    return left, right


def _starts(mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where each sequence begins among all that are packed, and how long the longest is."""
    import torch

    lengths = mask.sum(-1, dtype=torch.int32)
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())
