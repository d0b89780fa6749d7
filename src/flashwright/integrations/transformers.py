"""Hugging Face transformers: `register()` once, then `attn_implementation="flashwright"`.

    from flashwright.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashwright", dtype=torch.bfloat16)

The kernels compute causal, sliding-window and bidirectional attention, with a KV cache, grouped heads, soft caps and
packed sequences (`cu_seq_lens_q`, …, or positions that begin anew), in padded batches, in static caches and in
continuous batching. Inside `flashwright.distributed.context_parallel`, ranks share the sequence. A mask of another form
goes to PyTorch's SDPA, with one warning. As `flash_attention_2`, this relies on models handing their window over as
`sliding_window`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from flashwright.attention import attention
from flashwright.distributed.context import active_context
from flashwright.integrations import warn_once
from flashwright.integrations.carried_masks import (
    KeyRanges,
    PackedRows,
    attention_in_ranges,
    attention_of_packed_rows,
    is_traced,
    ranges_of_padding,
    rows_of_sequences,
    sides,
)
from flashwright.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashwright.integrations.kv_cache import flash_attn_with_kvcache
from flashwright.integrations.sdpa import autocast
from flashwright.operators.columns import kernel_columns, with_columns
from flashwright.problem.shapes import HEAD_DIM_STEP, MAX_D_HEAD
from flashwright.problem.window import Window

if TYPE_CHECKING:
    import torch

NAME = "flashwright"
PAGED_NAME = "paged|flashwright"
"""What continuous batching of transformers before 5.18 calls it by."""


def register() -> None:
    """Makes `attn_implementation="flashwright"` known to transformers 5; calling it again changes nothing."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "register() needs transformers 5 or later; install it with: pip install 'transformers>=5'"
        ) from error
    _be_importable_as_flash_attention()
    _refuse_fixed_tables()
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    from transformers import modeling_flash_attention_utils as utils

    if hasattr(utils, "lazy_import_paged_flash_attention"):  # where a paged cache is another implementation's
        from transformers.integrations.flash_paged import paged_attention_forward

        AttentionInterface.register(PAGED_NAME, paged_attention_forward)


def _be_importable_as_flash_attention() -> None:
    """Takes part in how transformers finds the functions of implementations whose name contains "flash".

    It imports them when a model is built, from a list of packages it knows; ours is not among them.
    """
    from transformers import modeling_flash_attention_utils as utils

    import_known = getattr(utils, "_lazy_imports", None)
    if import_known is None or getattr(import_known, "knows_flashwright", False):
        return

    def import_functions(implementation: str | None, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        if implementation not in (NAME, PAGED_NAME):
            return import_known(implementation, *arguments, **options)
        return flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, utils._pad_input, utils._unpad_input

    import_functions.knows_flashwright = True  # type: ignore[attr-defined]
    utils._lazy_imports = import_functions


def _refuse_fixed_tables() -> None:
    """Makes models that look their attention up in a table of classes say so: registered functions are not in it."""
    from transformers import PreTrainedModel

    choose = PreTrainedModel.get_correct_attn_implementation
    if getattr(choose, "knows_flashwright", False):
        return

    def get_correct_attn_implementation(self: Any, requested: str | None, *arguments: Any, **options: Any) -> str:
        if requested in (NAME, PAGED_NAME):
            _check_no_fixed_table(type(self))
        chosen: str = choose(self, requested, *arguments, **options)
        return chosen

    get_correct_attn_implementation.knows_flashwright = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation


def _check_no_fixed_table(model: type) -> None:
    for name, table in vars(sys.modules[model.__module__]).items():
        if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict) and NAME not in table:
            allowed = ", ".join(map(repr, table))
            raise ValueError(
                f"attn_implementation={NAME!r}: {model.__name__} takes its attention from a table of its own, {name}, "
                f"and asks no registered function; allowed: {allowed}"
            )


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """None where `attention_forward` derives the mask from its arguments; what a kernel needs to know of padding, a
    cache with room for more or packed sequences (`carried_masks`); otherwise the mask, as for SDPA."""
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    if active_context() is not None and _nothing_is_padded(attention_mask, kv_length, kv_offset):
        return None  # by positions in the whole sequence, which the lengths of a shard do not tell
    mask_function = causal_mask_function if mask_function is None else mask_function
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    pattern = None if chunked else _pattern(mask_function, allow_is_causal_skip, allow_is_bidirectional_skip)
    if pattern is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is not None:
            padding = padding[:, kv_offset : kv_offset + kv_length]
        first_row = q_offset - kv_offset
        found, is_found = _carried(
            pattern, padding, batch_size, q_length, kv_length, first_row, local_size, options.get("device")
        )
        if is_found:
            return found
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **options,
    )


def _nothing_is_padded(mask: torch.Tensor | None, kv_length: int, kv_offset: Any) -> bool:
    import torch

    if mask is None:
        return True
    if torch.compiler.is_compiling() or mask.shape[-1] < kv_offset + kv_length:
        return False
    return bool(mask[:, kv_offset : kv_offset + kv_length].all())


class Pattern(NamedTuple):
    """What a mask function says, padding apart, where that is known: a causal or no mask, perhaps in a window."""

    is_causal: bool
    sequences: torch.Tensor | None = None
    """(batch, rows): the number of the sequence that each row is of; rows attend to their own."""


def _pattern(mask_function: Any, allow_is_causal_skip: bool, allow_is_bidirectional_skip: bool) -> Pattern | None:
    """None of what is more than that. transformers combines functions: which, their names tell."""
    if is_traced():  # functions are not taken apart then
        from transformers.masking_utils import causal_mask_function

        if allow_is_causal_skip or mask_function is causal_mask_function:
            return Pattern(is_causal=True)
        return Pattern(is_causal=False) if allow_is_bidirectional_skip else None
    pieces = dict(_pieces(mask_function))
    if not pieces.keys() <= _KNOWN_PIECES:
        return None
    sequences = next(iter(pieces.get(_PACKED, {}).values()), None)
    if _IN_SEQUENCES in pieces and sequences is None:
        return None
    return Pattern("causal_mask_function" in pieces, sequences)


_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_IN_SEQUENCES = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_KNOWN_PIECES = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
    _PACKED,
    _IN_SEQUENCES,
}


def _pieces(mask_function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The functions that all have to agree: the name of each, and what its closure holds, by name."""
    cells = getattr(mask_function, "__closure__", None) or ()
    held = {name: cell.cell_contents for name, cell in zip(_free_names(mask_function), cells, strict=True)}
    name = getattr(mask_function, "__qualname__", "")
    if name == "and_masks.<locals>.and_mask":
        for each in held["mask_functions"]:
            yield from _pieces(each)
        return
    yield name, held
    # A function of positions within packed sequences (transformers 5.23). Those of one sequence follow one another, so
    # that distances are what they are between rows, and the other functions know nothing else of positions.
    if name == _IN_SEQUENCES:
        yield from _pieces(held["mask_function"])


def _free_names(function: Any) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_freevars


def _carried(
    pattern: Pattern,
    padding: torch.Tensor | None,
    batch: int,
    q_length: int,
    kv_length: int,
    first_row: Any,
    local_size: int | None,
    device: Any,
) -> tuple[torch.Tensor | None, bool]:
    """What is carried in the place of a mask, and whether anything can be."""
    stand_together = isinstance(first_row, int) and first_row == 0 and q_length == kv_length
    if pattern.sequences is not None:
        packed = rows_of_sequences(pattern.sequences) if padding is None and stand_together else None
        return (None, False) if packed is None else (packed.as_mask(), True)
    if padding is None:
        ends_together = isinstance(first_row, int) and first_row + q_length == kv_length
        if ends_together or (not pattern.is_causal and local_size is None):
            return None, True
    if not pattern.is_causal and local_size is not None and not stand_together:
        return None, False
    ranges = ranges_of_padding(padding, batch, q_length, kv_length, first_row, device)
    if ranges is None:
        return None, False
    nothing_is_padded = ranges.common_end == kv_length
    if nothing_is_padded and (ranges.end_together or (not pattern.is_causal and local_size is None)):
        return None, True
    if pattern.is_causal and stand_together and ranges.begin_together:
        return None, True  # padding on the right: no row that counts attends to it
    return ranges.as_mask(), True


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called by the model: (batch, heads, rows, head_dim) in, (batch, rows, heads, head_dim) out. With a paged `cache`,
    of continuous batching, keys and values are written to it and read from it first."""
    import torch

    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    head_dim = query.shape[-1]
    if (
        attention_mask is None and cu_seq_lens_q is None and cache is None and position_bias is None
        and s_aux is None and not dropout and not kwargs.get("output_attentions") and active_context() is None
        and (query.dtype is torch.bfloat16 or query.dtype is torch.float16)
        and head_dim == value.shape[-1] <= MAX_D_HEAD and head_dim % HEAD_DIM_STEP == 0
        and not torch.is_autocast_enabled("cuda" if query.is_cuda else query.device.type)
    ):  # fmt: skip
        # A step of a generation, which is not to wait for the questions below.
        sides_of_rows = None if sliding_window is None else _window(sliding_window, causal)[:2]
        out = attention(query, key, value, causal=causal, window=sides_of_rows, scale=scaling, softcap=softcap or 0.0)
        return out.transpose(1, 2).contiguous(), None
    if s_aux is not None:
        raise NotImplementedError("s_aux (attention sinks): not supported by flashwright")
    if kwargs.get("output_attentions"):
        warn_once("flashwright gives no attention weights (output_attentions); use attn_implementation='eager'")
    window = _window(sliding_window, causal)
    if cache is not None:
        paged = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, **kwargs}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=paged)
        cu_seq_lens_k, max_length_k, attention_mask = paged["cu_seq_lens_k"], paged["max_length_k"], None
    query, key, value = autocast(query, key, value)
    context = active_context()
    if context is not None:
        _check_shared(query, key, attention_mask if position_bias is None else position_bias, dropout)
        out = context.attention(
            query, key, value, cu_seqlens=cu_seq_lens_q, causal=causal, window=(window.left, window.right),
            scale=scaling, softcap=softcap or 0.0,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None
    rows, keys = query.shape[2], key.shape[2]
    packed = PackedRows.of_mask(attention_mask, rows * query.shape[0])
    ranges = KeyRanges.of_mask(attention_mask)
    carried = packed or ranges
    is_given_packed = query.shape[0] == 1 and cu_seq_lens_q is not None and cu_seq_lens_k is not None
    known = is_given_packed or (carried is not None and position_bias is None)
    reason = _why_not(query, key, value, None if known else attention_mask, dropout)
    if position_bias is not None or reason is not None:
        if carried is not None:
            attention_mask = carried.visible(window, rows, keys)
        if position_bias is not None:
            bias = position_bias if attention_mask is None else _as_bias(attention_mask, query.dtype) + position_bias
            attention_mask = _with_window(bias, window, query, key) if attention_mask is None else bias
        reason = reason or "a bias of positions is not supported"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if reason is not None:
        warn_once(f"attn_implementation='flashwright': {reason}; PyTorch's SDPA computes this")
        out = _by_pytorch(query, key, value, attention_mask, dropout, scaling, softcap, window)
        return out.transpose(1, 2).contiguous(), None
    value_head_dim = value.shape[-1]
    query, key, value = (with_columns(x, kernel_columns(x.shape[-1])) for x in (query, key, value))
    options = (window, scale, softcap or 0.0)
    found: torch.Tensor | None
    if is_given_packed:
        assert cu_seq_lens_q is not None and cu_seq_lens_k is not None
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        q_starts, k_starts = (x.to(torch.int32) for x in (cu_seq_lens_q, cu_seq_lens_k))
        found = flash_attn_varlen_func(
            q, k, v, q_starts, k_starts, max_length_q or q.shape[0], max_length_k or k.shape[0],
            softmax_scale=scale, window_size=sides(window), softcap=softcap or 0.0,
        )[None].transpose(1, 2)  # fmt: skip
    elif packed is not None:
        found = attention_of_packed_rows(query, key, value, packed, *options)
    elif ranges is not None:
        found = attention_in_ranges(query, key, value, ranges, *options)
        if found is None:
            visible = ranges.visible(window, rows, keys)
            found = _by_pytorch(query, key, value, visible, dropout, scale, softcap, window)
    else:
        found = attention(
            query, key, value, causal=causal, window=(window.left, window.right), scale=scale, softcap=softcap or 0.0
        )
    return found[..., :value_head_dim].transpose(1, 2).contiguous(), None


def _check_shared(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> None:
    """Raises `ValueError` for what ranks that share a sequence do not compute."""
    if mask is not None:
        raise ValueError(
            "context_parallel: a mask was given; allowed: causal or a window, of sequences without padding"
        )
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"context_parallel: {query.shape[2]} rows attend to {key.shape[2]} keys; allowed: calls without a KV cache"
        )
    if dropout:
        raise ValueError(f"context_parallel: attention dropout is {dropout}; allowed: 0")


def _window(sliding_window: int | None, causal: bool) -> Window:
    """transformers counts a row's own key into its window."""
    side = None if sliding_window is None else sliding_window - 1
    return Window(side, 0 if causal else side)


def _why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float
) -> str | None:
    import torch

    if mask is not None:
        return "a mask that is more than causal, a window, padding or packed sequences was given"
    if dropout:
        return "attention dropout is not supported"
    if query.is_cuda and query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {query.dtype} is not supported"
    if key.shape[:-1] != value.shape[:-1] or max(query.shape[-1], value.shape[-1]) > MAX_D_HEAD:
        return f"head dimensions above {MAX_D_HEAD} are not supported"
    return None


def _by_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    window: Window,
) -> torch.Tensor:
    import torch

    if mask is None:
        mask = _with_window(None, window, query, key)
    else:
        mask = mask[..., : key.shape[-2]]
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # with a mask, PyTorch has no kernel that shares heads
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if not softcap:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = softcap * torch.tanh((query @ key.mT).float() * (scale / softcap))
    if mask is not None:
        scores = scores + _as_bias(mask, scores.dtype)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    return torch.nn.functional.dropout(weights, dropout, training=dropout > 0) @ value


def _with_window(bias: Any, window: Window, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    from flashwright.runtime.reference import visible_keys

    visible = visible_keys(window, query.shape[2], key.shape[2], device=query.device)
    if visible is None or bias is None:
        return bias if visible is None else visible
    return bias + _as_bias(visible, bias.dtype)


def _as_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bias of the scores that a mask of bool means (True: visible); a bias is returned unchanged."""
    import torch

    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
