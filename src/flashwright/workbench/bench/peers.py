"""Other implementations of attention, to measure against.

A peer is imported when it is requested. One that is not installed is reported by name. A function of the user's own,
`module:function`, is a peer as well.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from flashwright.problem.flops import DECODE, FORWARD

Call = Callable[[], Any]


@dataclass(frozen=True)
class PagedCache:
    """Keys and values as (pages, heads, rows of a page, head_dim), and which pages each sequence has."""

    k: Any
    v: Any
    table: Any
    lengths: Any
    """Keys of each sequence."""


@dataclass(frozen=True)
class Inputs:
    """q, k and v as (batch, heads, rows, head_dim) views of tensors stored (batch, rows, heads, head_dim); of a paged
    cache, k and v are those of the last sequence."""

    q: Any
    k: Any
    v: Any
    causal: bool
    operation: str = FORWARD
    """What is timed. Unless it is the forward alone, q, k and v require gradients."""
    do: Any = None
    """The gradient of the output, where there is one."""
    cache: PagedCache | None = None
    """Where keys and values lie in pages."""

    @property
    def grouped(self) -> bool:
        return bool(self.q.shape[1] != self.k.shape[1])

    def rows_first(self) -> tuple[Any, Any, Any]:
        """The tensors as they are stored, which is the layout that `flash_attn` takes."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


@dataclass(frozen=True)
class Prepared:
    """An implementation ready to run on some inputs, over and over."""

    call: Call
    rows_first: bool = False
    """Whether the output is (batch, rows, heads, head_dim)."""
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context that calls run in; entering it is not timed on the host."""
    kernel: str = ""
    """The kernel it runs, where known."""

    def output(self) -> Any:
        """One call's output, as (batch, heads, rows, head_dim)."""
        with self.context():
            return self.called()

    def called(self) -> Any:
        """The same, in a context that was entered."""
        result = self.call()
        out = result[0] if isinstance(result, tuple) else result
        return out.transpose(1, 2) if self.rows_first else out

    def run(self) -> None:
        """One call, wherever it is made."""
        with self.context():
            self.call()


@dataclass(frozen=True)
class Peer:
    name: str
    label: str
    check: Callable[[], object]
    """Imports the implementation; raises ImportError if it is not installed."""
    prepare: Callable[[Inputs], Prepared]
    short: str = ""
    """The label where there is little room; empty: the name."""


def flash_attention_2(q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
    """PyTorch's own build of FlashAttention-2."""
    with _only_sdpa_backend("FLASH_ATTENTION"):
        return _sdpa(Inputs(q, k, v, causal))()


# --- In PyTorch ----------------------------------------------------------------------------------------------------


def _only_sdpa_backend(backend: str) -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, backend))


def _sdpa(inputs: Inputs) -> Call:
    from torch.nn.functional import scaled_dot_product_attention

    options: dict[str, Any] = {"enable_gqa": True} if inputs.grouped else {}
    rows, keys = inputs.q.shape[2], inputs.k.shape[2]
    if inputs.causal and rows not in (1, keys):  # `is_causal` aligns the first row with the first key
        from torch.nn.attention.bias import causal_lower_right

        options["attn_mask"] = causal_lower_right(rows, keys)
    else:
        options["is_causal"] = inputs.causal and rows == keys
    return partial(scaled_dot_product_attention, inputs.q, inputs.k, inputs.v, **options)


def _prepare_sdpa(backend: str, inputs: Inputs) -> Prepared:
    return Prepared(_sdpa(inputs), context=partial(_only_sdpa_backend, backend))


def _check_torch() -> None:
    import torch  # noqa: F401


def _check_flex() -> None:
    from torch.nn.attention.flex_attention import flex_attention  # noqa: F401


def _prepare_flex(inputs: Inputs) -> Prepared:
    """FlexAttention compiled for exactly these shapes, which is its fastest form."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = inputs.q, inputs.k, inputs.v
    mask = None
    if inputs.causal:
        ahead = k.shape[2] - q.shape[2]  # the last row sees the last key
        mask = create_block_mask(partial(_not_later, ahead), None, None, q.shape[2], k.shape[2], device=q.device)
    torch._dynamo.reset()  # a grid has more shapes than the compiler allows of one function
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    call = partial(compiled, q, k, v, block_mask=mask, enable_gqa=inputs.grouped)
    context = torch.no_grad if inputs.operation in (FORWARD, DECODE) else nullcontext
    with context():
        call()
    return Prepared(call, context=context)


def _not_later(ahead: int, batch: Any, head: Any, row: Any, key: Any) -> Any:
    return row + ahead >= key


# --- Tri Dao's packages --------------------------------------------------------------------------------------------


def _flash_attn() -> Callable[..., Any]:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found]

    return flash_attn_func


def _flash_attn_3() -> Callable[..., Any]:
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found]

    return flash_attn_func


def _flash_attn_4() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found]

    return flash_attn_func


def _prepare_flash_attn(load: Callable[[], Callable[..., Any]], inputs: Inputs) -> Prepared:
    return Prepared(partial(load(), *inputs.rows_first(), causal=inputs.causal), rows_first=True)


# --- The list ------------------------------------------------------------------------------------------------------

PEERS = {
    peer.name: peer
    for peer in (
        Peer("sdpa-fa2", "FlashAttention-2 (SDPA)", _check_torch, partial(_prepare_sdpa, "FLASH_ATTENTION"), "FA-2"),
        Peer("sdpa-cudnn", "cuDNN (SDPA)", _check_torch, partial(_prepare_sdpa, "CUDNN_ATTENTION"), "cuDNN"),
        Peer("sdpa-efficient", "memory-efficient (SDPA)", _check_torch, partial(_prepare_sdpa, "EFFICIENT_ATTENTION")),
        Peer("flex", "FlexAttention", _check_flex, _prepare_flex),
        Peer("flash-attn", "flash_attn (FA-2)", _flash_attn, partial(_prepare_flash_attn, _flash_attn)),
        Peer("fa3", "FlashAttention-3", _flash_attn_3, partial(_prepare_flash_attn, _flash_attn_3)),
        Peer("fa4", "FlashAttention-4", _flash_attn_4, partial(_prepare_flash_attn, _flash_attn_4)),
    )
}


def external_peer(text: str) -> Peer:
    """The function `module:function` as a peer: it takes (q, k, v, causal) and returns the output, through which
    gradients flow where they are timed.

    Tensors are (batch, heads, rows, head_dim) views of tensors stored (batch, rows, heads, head_dim). The function
    queues its work on PyTorch's current stream, and can be captured in a CUDA graph.
    """
    module_name, colon, path = text.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"peer: {text!r} is not allowed; allowed: module:function")
    try:
        function: Any = importlib.import_module(module_name)
        for name in path.split("."):
            function = getattr(function, name)
    except AttributeError as error:
        raise ValueError(f"peer: {text!r}: {error}") from error
    except Exception as error:  # an import runs other people's code
        raise ValueError(f"peer: {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"peer: {text!r} is a {type(function).__name__}; allowed: a function of (q, k, v, causal)")

    def prepare(inputs: Inputs) -> Prepared:
        return Prepared(partial(function, inputs.q, inputs.k, inputs.v, inputs.causal))

    return Peer(text, text, lambda: function, prepare)


def chosen_peers(names: Sequence[str] | None) -> list[Peer]:
    """The peers of those names, each once; all if none are named."""
    return [_peer(name) for name in dict.fromkeys(names)] if names else list(PEERS.values())


def _peer(name: str) -> Peer:
    if name in PEERS:
        return PEERS[name]
    near = difflib.get_close_matches(name, PEERS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"peers: {name!r} is not known; {hint}allowed: {', '.join(PEERS)}")


def installed(peers: Sequence[Peer]) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can be imported, and why the others cannot."""
    found, missing = [], {}
    for peer in peers:
        try:
            peer.check()
            found.append(peer)
        except Exception as error:  # a broken installation raises what it likes
            missing[peer.name] = (
                f"{type(error).__name__}: {error}" if not isinstance(error, ImportError) else str(error)
            )
    return found, missing
